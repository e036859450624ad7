"""Tasks of reasoning-gym: `task=offbeat_recipes.library.reasoning:ReasoningGym task.dataset=chain_sum`."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, cast

import numpy as np

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.config import GeneratedConfig
from offbeat_recipes.tasks.generated import GeneratedTask
from offbeat_trainer import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymConfig(GeneratedConfig):
    """`dataset` is one of reasoning-gym's, made with `args`. `instruction` stands below each question."""

    dataset: str = "chain_sum"  # a dataset of reasoning-gym
    args: dict[str, Any] = field(default_factory=dict[str, Any], metadata={"free": True})
    instruction: str = "Answer with the final answer alone."  # what stands below each question


class ReasoningGym(GeneratedTask):
    """The score is the dataset's own; with `<answer>` in a completion, of what stands in it."""

    Config = ReasoningGymConfig

    def __init__(self, config: ReasoningGymConfig, model_path: str, seed: int, **more: bool) -> None:
        """Make one item, so that a wrong name or argument is told before a run.

        Raises:
            TaskError: reasoning-gym is not installed, or makes no such dataset.
        """
        try:
            self._library: Any = import_module("reasoning_gym")
            self._scorer = self._dataset(config, 0)
        except ModuleNotFoundError as error:
            raise TaskError(
                "task.dataset: reasoning-gym is not installed; `uv pip install reasoning-gym`"
            ) from error
        except Exception as error:  # whatever a dataset raises
            raise TaskError(
                f"task.dataset: reasoning-gym makes no {config.dataset!r} with these args: {error}"
            ) from error
        super().__init__(config, model_path, seed, **more)

    def ask(self, rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
        """Return the question of a dataset of one item, made with a seed of `rng`, and the item."""
        item = self._dataset(self.config, int(rng.integers(2**31)))[0]
        return f"{item['question']}\n{self.config.instruction}".strip(), {"entry": item}

    def reward(self, completion: str, data: Mapping[str, object]) -> float:
        """Return what the dataset says of the answer."""
        marked = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
        answer = (marked[-1] if marked else completion).strip()
        return float(self._scorer.score_answer(answer, data["entry"]))

    def answer(self, prompt: Prompt) -> str:
        """Return the right answer, for supervised training."""
        return str(cast("dict[str, Any]", prompt.data["entry"])["answer"])

    def _dataset(self, config: ReasoningGymConfig, seed: int) -> Any:  # noqa: ANN401 a library's
        return self._library.create_dataset(config.dataset, size=1, seed=seed, **config.args)
