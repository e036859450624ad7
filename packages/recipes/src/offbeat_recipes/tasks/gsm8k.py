"""Grade-school word problems (GSM8K, arXiv 2110.14168) from local files in the public format.

Each row has `question` and `answer`; the answer ends in `#### ` and the number. A completion is right when its
number equals that one: commas (1,234), a dollar sign, a sign, decimals (42.0 is 42) and units around it do not
matter. `strict` looks at the line after the last `####`, which must hold one number; `flexible` takes the last
number anywhere.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING

from offbeat_recipes.errors import DataError
from offbeat_recipes.tasks.text import Messages, TextTask
from offbeat_trainer import Score

if TYPE_CHECKING:
    from offbeat_recipes.tasks.config import Gsm8kConfig
    from offbeat_recipes.tasks.rows import Row
    from offbeat_trainer import Prompt, Trajectory

INSTRUCTION = "Reason step by step. Write the final number alone on the last line, after ####."
_MARK = "####"
# A minus belongs to the number unless it stands between two (5-3) or ends a word (half-3).
_NUMBER = re.compile(
    r"(?P<before>(?<![\w)])-\s?\$?|\$\s?-|)(?P<value>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)
_CALCULATION = re.compile(r"<<[^<>]*>>")  # the public data's calculator annotations


def numbers(text: str) -> list[Decimal]:
    """Return the numbers of `text` in order, without commas, currency and units."""
    return [
        -Decimal(match["value"].replace(",", ""))
        if match["before"]
        else Decimal(match["value"].replace(",", ""))
        for match in _NUMBER.finditer(text)
    ]


def strict_answer(text: str) -> Decimal | None:
    """Return the one number on the line after the last `####`; None if there is no such line, or not one number."""
    _, mark, after = text.rpartition(_MARK)
    if not mark:
        return None
    lines = after.strip().splitlines()
    found = numbers(lines[0]) if lines else []
    return found[0] if len(found) == 1 else None


def flexible_answer(text: str) -> Decimal | None:
    """Return the last number of `text`; None if there is none."""
    found = numbers(text)
    return found[-1] if found else None


class Gsm8kTask(TextTask):
    """Word problems with the answer-extraction reward: 1 for the right number, else 0."""

    def __init__(
        self, config: Gsm8kConfig, model_path: str, seed: int, *, trust_remote_code: bool = False
    ) -> None:
        """Read both files; see `TextTask`."""
        self._extract = strict_answer if config.answer == "strict" else flexible_answer
        self._template = config.chat_template
        super().__init__(config, model_path, seed, trust_remote_code=trust_remote_code)

    def asked(self, row: Row) -> str | Messages:
        """Return the question with the instruction, as a chat where the tokenizer has a template."""
        if strict_answer(row.text("answer")) is None:
            raise DataError(f"{row.place}: 'answer' must end in '#### ' and one number")
        text = f"{row.text('question').strip()}\n{INSTRUCTION}"
        if self._template == "never" or not self.maker.has_template:
            return f"{text}\n"
        return [{"role": "user", "content": text}]

    def answer(self, prompt: Prompt) -> str:
        """Return the worked answer without the calculator annotations."""
        return _CALCULATION.sub("", str(prompt.data["answer"]))

    def vote(self, text: str) -> Decimal | None:
        """Return the number that counts as the answer."""
        return self._extract(text)

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Return 1 for a completion whose extracted number equals the row's, else 0."""
        given = self._extract(self.decode(trajectory.token_ids.tolist()))
        correct = given is not None and given == strict_answer(str(prompt.data["answer"]))
        return Score(reward=float(correct), correct=correct)
