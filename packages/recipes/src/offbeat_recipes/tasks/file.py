"""Any prompts from JSONL, parquet or CSV, with any reward function.

Prompts with two completions each, of which one is preferred, from JSONL, parquet or CSV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from offbeat_recipes.errors import DataError, TaskError
from offbeat_recipes.tasks.rows import Stream, epoch_indices, is_text
from offbeat_recipes.tasks.text import Messages, TextTask, messages_or_text
from offbeat_trainer import Labelled, Pair
from offbeat_trainer.data.loading import load_object
from offbeat_trainer.errors import LoadError, PlanRefused
from offbeat_trainer.rollouts.own import ScorerSetup, find_scorer
from offbeat_trainer.rollouts.scorer import TRL, FunctionScorer, find_reward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from offbeat_recipes.tasks.config import FileConfig
    from offbeat_recipes.tasks.rows import Row
    from offbeat_trainer import Prompt, Scorer
    from offbeat_trainer.config import RewardConfig
    from offbeat_trainer.rollouts.scorer import Reward


class FileTask(TextTask):
    """Prompts in the column `prompt`: text, or a list of messages {"role", "content"}. `rewards` are the user's functions."""

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
        return messages_or_text(row, "prompt")

    def answer(self, prompt: Prompt) -> str:
        """Return the text of the column `answer`.

        Raises:
            DataError: the row has none.
        """
        value = prompt.data.get("answer")
        if not is_text(value) or not value:
            raise DataError(
                f"row {prompt.uid}: supervised training needs text under 'answer' (task.columns.answer names another column), got {value!r}"
            )
        return value

    def labelled(self, step: int, num_rows: int) -> list[Labelled]:
        """Return rows of `step` with their answers and labels: none twice in an epoch; a pure function of seed and step."""
        return self._labelled(self._take(step, num_rows, Stream.PROMPTS))

    def validation_labelled(self, num_rows: int) -> list[Labelled]:
        """Return the first `num_rows` rows of each validation file with their answers and labels."""
        return self._labelled(self.validation_prompts(num_rows))

    def _labelled(self, prompts: Sequence[Prompt]) -> list[Labelled]:
        labels = [prompt.data.get("label") for prompt in prompts]
        for prompt, label in zip(prompts, labels, strict=True):
            if not isinstance(label, bool):
                raise DataError(f"row {prompt.uid}: 'label' must be true or false, got {label!r}")
        return [
            Labelled(prompt_ids=one.prompt_ids, completion_ids=one.completion_ids, desirable=bool(label))
            for one, label in zip(self._worked(prompts), labels, strict=True)
        ]

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
            if (
                isinstance(path, str)
                and path
                and not path.startswith(TRL)
                and hasattr(load_object(path), "score")
            ):
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


BOTH = ("chosen", "rejected")


class PairsTask(TextTask):
    """Rows of prompt, chosen and rejected completion: each text, or messages; of a completion, one message of the assistant.

    Supervised training learns the chosen ones.
    """

    def asked(self, row: Row) -> str | Messages:
        """Return the row's prompt; its completions are looked at, too.

        Raises:
            DataError: one of them is not what it must be, or both completions are one.
        """
        chosen, rejected = (_completion(row, key) for key in BOTH)
        if chosen == rejected:
            raise DataError(f"{row.place}: 'chosen' and 'rejected' are the same; leave the row out")
        return messages_or_text(row, "prompt")

    def answer(self, prompt: Prompt) -> str:
        """Return the chosen completion."""
        return _text(prompt.data["chosen"])

    def pairs(self, step: int, num_pairs: int) -> list[Pair]:
        """Return the pairs of `step`: none twice in an epoch; a pure function of seed and step."""
        return self._made(self._take(step, num_pairs, Stream.PROMPTS))

    def validation_pairs(self, num_pairs: int) -> list[Pair]:
        """Return the first `num_pairs` pairs of the validation file."""
        return self._made(self.validation_prompts(num_pairs))

    def labelled(self, step: int, num_rows: int) -> list[Labelled]:
        """Return completions of pairs, each by itself: a chosen one is desirable. An epoch has both of each pair once."""
        drawn = epoch_indices(2 * len(self._train), step, num_rows, self._seed, Stream.PROMPTS)
        pairs = self._made([self._train[index // 2].prompt for index in drawn])
        return [_parted(pair)[index % 2] for index, pair in zip(drawn, pairs, strict=True)]

    def validation_labelled(self, num_rows: int) -> list[Labelled]:
        """Return both completions of each of the first `num_rows` pairs of the validation file, all chosen ones first."""
        parted = [_parted(pair) for pair in self.validation_pairs(num_rows)]
        return [both[side] for side in (0, 1) for both in parted]

    def scorer(self, config: RewardConfig, log: Path) -> Scorer:
        """Refuse: nothing here says what another completion would be worth.

        Raises:
            TaskError: always.
        """
        raise TaskError("task: pairs say which of two completions is better, and nothing of others")

    def _learned(self, prompt: Prompt, reads: str) -> list[str]:
        if reads == "examples":
            return super()._learned(prompt, reads)
        return [_text(prompt.data[key]) for key in BOTH]

    def _made(self, prompts: Sequence[Prompt]) -> list[Pair]:
        made = [(prompt, self.maker.encode(self._learned(prompt, "pairs"))) for prompt in prompts]
        return [
            Pair(prompt_ids=prompt.token_ids, chosen_ids=tuple(chosen), rejected_ids=tuple(rejected))
            for prompt, (chosen, rejected) in made
        ]


def _parted(pair: Pair) -> tuple[Labelled, Labelled]:
    return (
        Labelled(prompt_ids=pair.prompt_ids, completion_ids=pair.chosen_ids, desirable=True),
        Labelled(prompt_ids=pair.prompt_ids, completion_ids=pair.rejected_ids, desirable=False),
    )


def _completion(row: Row, key: str) -> str:
    value = messages_or_text(row, key)
    if isinstance(value, str):
        return value
    if len(value) != 1 or value[0]["role"] != "assistant" or not value[0]["content"].strip():
        raise DataError(
            f"{row.place}: {key!r} must be text, or one message of the assistant; what comes before it is the prompt. Got {value!r:.200}"
        )
    return value[0]["content"]


def _text(value: object) -> str:
    return value if isinstance(value, str) else cast("Messages", value)[0]["content"]
