"""Problems that a tiny model cannot work out, and a calculator that can: `47*86+29=`, from left to right.

    policy        47*86      calculator  4042;
    policy        4042+29    calculator  4071;
    policy        :4071      right

The calculator shows four digits, and `????` for what it cannot read or show. The reward is exact and looks at the result alone, what
stands after the `:`. The careless hand writes down some number at once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from offbeat_recipes.tasks.chars import CharTask
from offbeat_rollout import Finish
from offbeat_trainer import Action, Feedback, Prompt

if TYPE_CHECKING:
    import numpy as np

    from offbeat_recipes.tasks.chars import Past

RESULT = ":"
SHOWN_END = ";"
UNREADABLE = "????"
OPERATIONS = "+*"
ALPHABET = f"0123456789{OPERATIONS}={RESULT}{SHOWN_END}?"
_DIGITS = 4
_CALL = re.compile(r"(\d+)([+*])(\d+)")


def shown(call: str) -> str:
    """Return what the calculator shows for `call`: one operation of two whole numbers."""
    read = _CALL.fullmatch(call)
    if read is None:
        return UNREADABLE
    left, operation, right = int(read[1]), read[2], int(read[3])
    value = left + right if operation == "+" else left * right
    return f"{value:0{_DIGITS}}" if value < 10**_DIGITS else UNREADABLE


class Calculator:
    """The environment: it works out what it is asked, and compares the result."""

    def __init__(self) -> None:
        self._answer = ""

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin with `prompt`; there is nothing to say before the first call."""
        del seed
        self._answer = str(prompt.data["answer"])
        return ""

    def step(self, action: Action) -> Feedback:
        """Return what the calculator shows, or whether the result is right."""
        if not action.text.startswith(RESULT):
            return Feedback(observation=shown(action.text) + SHOWN_END)
        right = action.finish == Finish.STOP and action.text == RESULT + self._answer
        return Feedback(reward=float(right), correct=right, done=True)


class CalculatorTask(CharTask):
    """Problems `a o b + c` of two-digit numbers, o one of `+*`, with their answers in four digits."""

    alphabet = ALPHABET
    environment = Calculator

    def ask(self, rng: np.random.Generator) -> tuple[str, dict[str, object]]:
        """Draw a problem, and work it out."""
        left, right, last = (int(number) for number in rng.integers(10, 100, size=3))
        first = f"{left}{OPERATIONS[int(rng.integers(len(OPERATIONS)))]}{right}"
        return f"{first}+{last}=", {"answer": shown(f"{int(shown(first))}+{last}")}

    def say(self, prompt: Prompt, past: Past, rng: np.random.Generator, *, careless: bool) -> str:
        """Return a call, then another with its result, then the result of that; a careless hand some number."""
        if careless:
            return f"{RESULT}{rng.integers(10**_DIGITS):0{_DIGITS}}"
        heard = past[-1][1].removesuffix(SHOWN_END) if past else ""
        return (prompt.text[:5], f"{heard}{prompt.text[5:-1]}", f"{RESULT}{heard}")[len(past)]

    def lengths(self) -> tuple[int, int]:
        """See `CharTask.lengths`: two calls and the result, each with its end token, and what the calculator shows after each call."""
        said = len("47*86") + len("4042+29") + len(":4071") + 3
        return len("47*86+29="), said + 2 * len("4042;")
