"""Any prompts from JSONL or parquet, with any reward function."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, SupportsFloat, cast

from offbeat_recipes.errors import DataError, TaskError
from offbeat_recipes.tasks.text import Messages, TextTask, load_function
from offbeat_trainer import Score

if TYPE_CHECKING:
    from offbeat_recipes.config import FileConfig
    from offbeat_recipes.tasks.rows import Row
    from offbeat_rollout import Completion
    from offbeat_trainer import Prompt


class FileTask(TextTask):
    """Prompts under `prompt_key`: text, or a list of messages {"role", "content"}.

    The reward is a function of (prompt text, completion text, row).
    """

    def __init__(self, config: FileConfig, model_path: str, seed: int) -> None:
        """Import the reward and read both files.

        Raises:
            TaskError: no such function, or see `TextTask`.
        """
        if not config.reward:
            raise TaskError("task.reward: needed, package.module:function or file.py:function")
        self._reward = load_function(config.reward, "task.reward")
        self._file = config
        super().__init__(config, model_path, seed)

    def asked(self, row: Row) -> str | Messages:
        """Return the row's prompt.

        Raises:
            DataError: it is neither text nor a list of messages.
        """
        value = row.get(self._file.prompt_key)
        if isinstance(value, str):
            return row.text(self._file.prompt_key)
        messages = cast("list[object]", value) if isinstance(value, list) else []
        if not messages or not all(_is_message(item) for item in messages):
            raise DataError(
                f"{row.place}: {self._file.prompt_key!r} must be text or a list of "
                f'{{"role": ..., "content": ...}}, got {value!r}'
            )
        return cast("Messages", messages)

    def answer(self, prompt: Prompt) -> str:
        """Return the text under `answer_key`.

        Raises:
            DataError: the row has none.
        """
        value = prompt.data.get(self._file.answer_key)
        if not isinstance(value, str) or not value:
            raise DataError(
                f"row {prompt.uid}: supervised training needs text under {self._file.answer_key!r}, got {value!r}"
            )
        return value

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """Return the reward function's number; at least `correct_at` counts as correct.

        Raises:
            TaskError: the function raised, or returned no finite number.
        """
        where = f"task.reward: {self._file.reward}"
        try:
            given = self._reward(prompt.text, self.decode(completion.token_ids.tolist()), dict(prompt.data))
        except Exception as error:
            raise TaskError(f"{where} raised {type(error).__name__}: {error} for {prompt.uid}") from error
        # `SupportsFloat`: numpy's numbers and tensors of one element are numbers, too.
        if not isinstance(given, SupportsFloat) or not math.isfinite(float(given)):
            raise TaskError(f"{where} returned {given!r} for {prompt.uid}, not a finite number")
        return Score(reward=float(given), correct=float(given) >= self._file.correct_at)


def _is_message(item: object) -> bool:
    if not isinstance(item, dict):
        return False
    message = cast("dict[object, object]", item)
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
