"""Numbers and a target, tried in several turns: `7,5,3:22=` is solved by `7+5*3`, or any other expression that is worth 22.

    policy        7+5        game  12;
    policy        7+5*3      game  (found)

Each number may be used once, and none other, with `+`, `-` and `*`. An expression that is worth the target earns 1, and a twentieth less
for each try before. An empty turn gives up, as the careless hand does after its first try.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain, combinations, product, zip_longest
from math import prod
from typing import TYPE_CHECKING, Any, cast

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.chars import CharTask
from offbeat_rollout import Finish
from offbeat_trainer import Action, Feedback, Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from offbeat_recipes.tasks.chars import Past

SHOWN_END, UNREADABLE = ";", "!"
_PRICE = 0.05
"""What each try but the last costs."""
_EXPRESSION = re.compile(r"[0-9]+([-+*][0-9]+)*")


def value(expression: str, numbers: Sequence[int]) -> int | None:
    """Return what `expression` is worth, None for none, or one that uses a number more often than it is among `numbers`."""
    if not _EXPRESSION.fullmatch(expression):
        return None
    if Counter(re.findall("[0-9]+", expression)) - Counter(map(str, numbers)):
        return None
    products = re.findall(r"([-+]?)([0-9*]+)", expression)
    return sum((-1 if sign == "-" else 1) * prod(map(int, each.split("*"))) for sign, each in products)


class Countdown:
    """The environment: it says what each try is worth."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin with `prompt`."""
        del seed
        self._numbers, self._target = cast("Any", prompt.data["numbers"]), prompt.data["target"]
        return ""

    def step(self, action: Action) -> Feedback:
        """Return the value of an expression, or `!` for what is none of these numbers."""
        worth = value(action.text, self._numbers)
        if worth == self._target and action.finish == Finish.STOP:
            return Feedback(reward=1 - _PRICE * action.turn, correct=True, done=True)
        if not action.text:
            return Feedback(correct=False, done=True)
        return Feedback(observation=f"{UNREADABLE if worth is None else worth}{SHOWN_END}")


class CountdownTask(CharTask):
    """Targets of expressions that use `config.used` of `config.count` numbers, in the order in which they are shown."""

    alphabet = f"0123456789,:=+-*{SHOWN_END}{UNREADABLE}"
    environment = Countdown

    def ask(self, rng: np.random.Generator) -> tuple[str, dict[str, object]]:
        """Draw numbers, and an expression of them."""
        numbers: list[int] = rng.integers(1, self.config.largest + 1, size=int(self.config.count)).tolist()
        expressions = self._expressions(numbers)
        target = value(expressions[int(rng.integers(len(expressions)))], numbers)
        return f"{','.join(map(str, numbers))}:{target}=", {"numbers": numbers, "target": target}

    def say(self, prompt: Prompt, past: Past, rng: np.random.Generator, *, careless: bool) -> str:
        """Return one expression after the other; a careless hand gives up after the first."""
        del rng
        return (
            ""
            if careless and past
            else self._expressions(cast("list[int]", prompt.data["numbers"]))[len(past)]
        )

    def lengths(self) -> tuple[int, int]:
        """See `CharTask.lengths`; what cannot be is refused here.

        Raises:
            TaskError: an expression would need more numbers than there are.
        """
        if self.config.used > self.config.count:
            raise TaskError(
                f"task.used {self.config.used} is more than task.count {self.config.count}; use at most all numbers"
            )
        count, used, digits = self.config.count, self.config.used, len(str(self.config.largest))
        worth = len(str(self.config.largest**used))
        longest_try = used * digits + used - 1 + 1 + worth + len(SHOWN_END)
        return count * digits + count + worth + 1, longest_try * len(self._expressions([1] * count))

    def _expressions(self, numbers: Sequence[int]) -> list[str]:
        used: int = self.config.used
        return [
            "".join(chain.from_iterable(zip_longest(map(str, some), operations, fillvalue="")))
            for some in combinations(numbers, used)
            for operations in product("+-*", repeat=used - 1)
        ]
