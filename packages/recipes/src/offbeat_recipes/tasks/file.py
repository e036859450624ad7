"""Any prompts from JSONL or parquet, with any reward function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_recipes.errors import DataError, TaskError
from offbeat_recipes.tasks.rows import is_text
from offbeat_recipes.tasks.text import Messages, TextTask, messages_or_text
from offbeat_trainer.errors import LoadError, PlanRefused
from offbeat_trainer.loading import load_object
from offbeat_trainer.rollouts.own import ScorerSetup, find_scorer
from offbeat_trainer.scoring.functions import find_reward
from offbeat_trainer.scoring.scorer import FunctionScorer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from offbeat_recipes.tasks.config import FileConfig
    from offbeat_recipes.tasks.rows import Row
    from offbeat_trainer import Prompt, Scorer
    from offbeat_trainer.config import RewardConfig
    from offbeat_trainer.scoring.functions import Reward


class FileTask(TextTask):
    """Prompts under `prompt_key`: text, or a list of messages {"role", "content"}. `rewards` are the user's functions."""

    def __init__(
        self, config: FileConfig, model_path: str, seed: int, *, trust_remote_code: bool = False
    ) -> None:
        """Read both files and import the rewards, if any: supervised training needs none.

        Raises:
            TaskError: no such function, or see `TextTask`.
        """
        self._file = config
        super().__init__(config, model_path, seed, trust_remote_code=trust_remote_code)
        self._make_scorer = self._find_scorer()
        self.rewards = () if self._make_scorer else self._find_rewards()

    def asked(self, row: Row) -> str | Messages:
        """Return the row's prompt.

        Raises:
            DataError: it is neither text nor a list of messages.
        """
        return messages_or_text(row, self._file.prompt_key)

    def answer(self, prompt: Prompt) -> str:
        """Return the text under `answer_key`.

        Raises:
            DataError: the row has none.
        """
        value = prompt.data.get(self._file.answer_key)
        if not is_text(value) or not value:
            raise DataError(
                f"row {prompt.uid}: supervised training needs text under {self._file.answer_key!r}, got {value!r}"
            )
        return value

    def scorer(self, config: RewardConfig, log: Path) -> Scorer:
        """Return what scores completions: the class of `reward`, or its functions; what these print goes to `log`.

        Raises:
            TaskError: there is none.
        """
        if self._make_scorer:
            return self._make_scorer(ScorerSetup(task=self, config=config, log=log))
        if not self.rewards:
            raise TaskError("task.reward: needed, package.module:function or file.py:function")
        return FunctionScorer(
            self.rewards, config, decode=self.decode, correct_at=self._file.correct_at, log=log
        )

    def _find_scorer(self) -> Callable[[ScorerSetup], Scorer] | None:
        """Return the class of `reward`, if it is the path of one that scores groups."""
        path = self._file.reward
        try:
            if isinstance(path, str) and path and hasattr(load_object(path), "score"):
                return find_scorer(path)
        except (LoadError, PlanRefused) as error:
            raise TaskError(f"task.reward: {error}") from error
        return None

    def _find_rewards(self) -> tuple[Reward, ...]:
        given, weights = self._file.reward, self._file.reward_weights
        paths = ((given,) if given else ()) if isinstance(given, str) else given
        if weights and len(weights) != len(paths):
            raise TaskError(
                f"task.reward_weights: {len(weights)} numbers for {len(paths)} functions of task.reward; give one each"
            )
        if len(set(paths)) != len(paths):
            raise TaskError(f"task.reward: names a function twice: {', '.join(paths)}")
        try:
            return tuple(
                find_reward(path, weight, self.columns)
                for path, weight in zip(paths, weights or [1.0] * len(paths), strict=True)
            )
        except PlanRefused as error:
            raise TaskError(f"task.reward: {error}") from error
