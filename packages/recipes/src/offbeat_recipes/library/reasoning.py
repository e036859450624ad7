"""Tasks of reasoning-gym: `task=offbeat_recipes.library.reasoning:ReasoningGym task.dataset=chain_sum`."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
import re
from bisect import bisect_right
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from decimal import localcontext
from functools import partial
from importlib import import_module
from typing import Any, Self, cast

import numpy as np

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.config import GeneratedConfig
from offbeat_recipes.tasks.generated import GeneratedTask
from offbeat_trainer import Example, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymConfig(GeneratedConfig):
    """`dataset` is one of reasoning-gym's, made with `args`. `instruction` stands below each question.

    `level_steps` follow the dataset's own curriculum: [50, 100] is its level 0 at first, 1 after the prompts of 50 steps, 2 after 100.
    A level decides what it is about, `args` the rest. Validation is of the last level; with none of them there is no curriculum.
    """

    dataset: str = "chain_sum"  # a dataset of reasoning-gym
    args: dict[str, Any] = field(default_factory=dict[str, Any], metadata={"free": True})
    instruction: str = "Answer with the final answer alone."  # what stands below each question
    level_steps: tuple[int, ...] = ()  # steps after which the next level of its curriculum begins


@contextmanager
def _undisturbed() -> Generator[None]:
    """Keep what datasets set for the whole process: the precision of decimals (decimal_arithmetic), NumPy's seed (pool_matrix)."""
    before = np.random.get_state()
    try:
        with localcontext():
            yield
    finally:
        np.random.set_state(before)


def _levels_of(library: Any, config: ReasoningGymConfig) -> list[dict[str, Any]]:  # noqa: ANN401 a library's
    """Return the arguments of each level of the dataset's curriculum, or those of `config` alone."""
    if not config.level_steps:
        return [config.args]
    curriculum: Any = library.create_curriculum(config.dataset)
    most = max(len(one.levels) for one in curriculum.attributes.values()) - 1
    if len(config.level_steps) > most:
        raise ValueError(
            f"`task.level_steps` may have {most} steps for {config.dataset!r}, got {len(config.level_steps)}"
        )
    levels: list[dict[str, Any]] = []
    for level in range(len(config.level_steps) + 1):
        curriculum.set_global_level(level)
        made = cast("dict[str, Any]", vars(curriculum.generate_configuration(config.args)))
        levels.append({name: made[name] for name in made.keys() - {"seed", "size"}})
    return levels


def _made(config: ReasoningGymConfig) -> tuple[Callable[..., Any], list[dict[str, Any]], list[Any]]:
    """Return what makes a dataset, the arguments of each level, and a dataset of each, which scores.

    Raises:
        TaskError: reasoning-gym is not installed, or makes no such dataset.
    """
    if list(config.level_steps) != sorted(config.level_steps):
        raise TaskError(f"task.level_steps: steps must not fall, got {list(config.level_steps)}")
    try:
        library: Any = import_module("reasoning_gym.factory")
        make = partial(library.create_dataset, config.dataset, size=1)
        levels = _levels_of(library, config)
        return make, levels, [make(seed=0, **args) for args in levels]
    except ModuleNotFoundError as error:
        raise TaskError(
            f"task.dataset: reasoning-gym cannot be imported ({error}); `uv pip install reasoning-gym`"
        ) from error
    except Exception as error:  # whatever a dataset raises
        raise TaskError(
            f"task.dataset: reasoning-gym makes no {config.dataset!r} with these args: {error}"
        ) from error


class ReasoningGym(GeneratedTask):
    """The score is the dataset's own; with `<answer>` in a completion, of what stands in it."""

    Config = ReasoningGymConfig

    def __init__(self, config: ReasoningGymConfig, model_path: str, seed: int, **more: bool) -> None:
        """Make a dataset of each level, so that a wrong name or argument is told before a run.

        Raises:
            TaskError: reasoning-gym is not installed, or makes no such dataset.
        """
        self._make, self._levels, self._scorers = _made(config)
        self._level = len(self._levels) - 1
        super().__init__(config, model_path, seed, **more)

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Return training prompts of the level that `step` has."""
        return super(ReasoningGym, self._at(step)).prompts(step, num_prompts)

    def examples(self, step: int, num_examples: int) -> list[Example]:
        """Return training examples of the level that `step` has."""
        return super(ReasoningGym, self._at(step)).examples(step, num_examples)

    def ask(self, rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
        """Return the question of a dataset of one item, made with a seed of `rng`, and the item with its level."""
        with _undisturbed():
            item = self._make(seed=int(rng.integers(2**31)), **self._levels[self._level])[0]
        asked = f"{item['question']}\n{self.config.instruction}".strip()
        return asked, {"entry": item, "level": self._level}

    def reward(self, completion: str, data: Mapping[str, object]) -> float:
        """Return what the dataset says of the answer."""
        marked = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
        answer = (marked[-1] if marked else completion).strip()
        try:
            return float(self._scorers[cast("int", data["level"])].score_answer(answer, data["entry"]))
        except ValueError:  # of prime_factorization, where an answer is no numbers: it is wrong
            return 0.0

    def answer(self, prompt: Prompt) -> str:
        """Return the right answer, for supervised training."""
        return str(cast("dict[str, Any]", prompt.data["entry"])["answer"])

    def _at(self, step: int) -> Self:
        """Return this task at the level of `step`: of the step alone, so that a run that goes on meets the same prompts."""
        here = copy(self)
        here._level = bisect_right(self.config.level_steps, step)  # noqa: SLF001 a copy of its own
        return here
