"""Prompts with two completions each, of which one is preferred, from JSONL or parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from offbeat_recipes.errors import DataError, TaskError
from offbeat_recipes.tasks.rows import Stream
from offbeat_recipes.tasks.text import Messages, TextTask, messages_or_text
from offbeat_trainer import Pair

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from offbeat_recipes.tasks.config import PairsConfig
    from offbeat_recipes.tasks.rows import Row
    from offbeat_trainer import Prompt, Scorer
    from offbeat_trainer.config import RewardConfig


class PairsTask(TextTask):
    """Rows of prompt, chosen and rejected completion: each text, or messages; of a completion, one message of the assistant.

    Supervised training learns the chosen ones.
    """

    def __init__(
        self, config: PairsConfig, model_path: str, seed: int, *, trust_remote_code: bool = False
    ) -> None:
        """Read both files.

        Raises:
            TaskError: a file, a row or the tokenizer cannot be used.
        """
        self._pairs_config = config
        super().__init__(config, model_path, seed, trust_remote_code=trust_remote_code)

    def asked(self, row: Row) -> str | Messages:
        """Return the row's prompt; its completions are looked at, too.

        Raises:
            DataError: one of them is not what it must be, or both completions are one.
        """
        config = self._pairs_config
        chosen, rejected = (_completion(row, key) for key in (config.chosen_key, config.rejected_key))
        if chosen == rejected:
            raise DataError(
                f"{row.place}: {config.chosen_key!r} and {config.rejected_key!r} are the same; leave the row out"
            )
        return messages_or_text(row, config.prompt_key)

    def answer(self, prompt: Prompt) -> str:
        """Return the chosen completion."""
        return _text(prompt.data[self._pairs_config.chosen_key])

    def pairs(self, step: int, num_pairs: int) -> list[Pair]:
        """Return the pairs of `step`: none twice in an epoch; a pure function of seed and step."""
        return self._made(self._take(step, num_pairs, Stream.PROMPTS))

    def validation_pairs(self, num_pairs: int) -> list[Pair]:
        """Return the first `num_pairs` pairs of the validation file."""
        return self._made(self.validation_prompts(num_pairs))

    def scorer(self, config: RewardConfig, log: Path) -> Scorer:
        """Refuse: nothing here says what another completion would be worth.

        Raises:
            TaskError: always.
        """
        raise TaskError("task: pairs say which of two completions is better, and nothing of others")

    def _learned(self, prompt: Prompt, reads: str) -> list[str]:
        if reads != "pairs":
            return super()._learned(prompt, reads)
        config = self._pairs_config
        return [_text(prompt.data[key]) for key in (config.chosen_key, config.rejected_key)]

    def _made(self, prompts: Sequence[Prompt]) -> list[Pair]:
        made = [(prompt, self.maker.encode(self._learned(prompt, "pairs"))) for prompt in prompts]
        return [
            Pair(prompt_ids=prompt.token_ids, chosen_ids=tuple(chosen), rejected_ids=tuple(rejected))
            for prompt, (chosen, rejected) in made
        ]


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
