"""Numbers and a target: `7,5,3:22=` is answered by `7+5*3`, or any other expression of `+`, `-` and `*` that is worth 22.

Each number may be used once, and none other. The reward is exact and looks at the last try alone: `7+5+3=15,7+5*3=22` is right, too, and
what stands after `=` is not read. The careless hand stops after its first try.
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

_EXPRESSION = re.compile(r"[0-9]+([-+*][0-9]+)*")


def value(expression: str, numbers: Sequence[int]) -> int | None:
    """Return what `expression` is worth, None for none, or one that uses a number more often than it is among `numbers`."""
    if not _EXPRESSION.fullmatch(expression):
        return None
    if Counter(re.findall("[0-9]+", expression)) - Counter(map(str, numbers)):
        return None
    products = re.findall(r"([-+]?)([0-9*]+)", expression)
    return sum((-1 if sign == "-" else 1) * prod(map(int, each.split("*"))) for sign, each in products)


def last_try(text: str) -> str:
    """Return the last expression of an answer."""
    return text.rpartition(",")[2].partition("=")[0]


class Countdown:
    """The environment, of one turn."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin with `prompt`."""
        del seed
        self._numbers, self._target = cast("Any", prompt.data["numbers"]), prompt.data["target"]
        return ""

    def step(self, action: Action) -> Feedback:
        """Return whether the expression is worth the target."""
        right = action.finish == Finish.STOP and value(last_try(action.text), self._numbers) == self._target
        return Feedback(reward=float(right), correct=right, done=True)


class CountdownTask(CharTask):
    """Targets of expressions that use `config.used` of `config.count` numbers, in the order in which they are shown."""

    alphabet = "0123456789,:=+-*"
    environment = Countdown

    def ask(self, rng: np.random.Generator) -> tuple[str, dict[str, object]]:
        """Draw numbers, and an expression of them."""
        numbers: list[int] = rng.integers(1, self.config.largest + 1, size=int(self.config.count)).tolist()
        expressions = self._expressions(numbers)
        target = value(expressions[int(rng.integers(len(expressions)))], numbers)
        return f"{','.join(map(str, numbers))}:{self._shown(target)}=", {"numbers": numbers, "target": target}

    def say(self, prompt: Prompt, past: Past, rng: np.random.Generator, *, careless: bool) -> str:
        """Return tries, each with what it is worth, until one is worth the target; of a careless hand the first."""
        del past, rng
        numbers, tries = cast("list[int]", prompt.data["numbers"]), list[str]()
        for expression in self._expressions(numbers):
            worth = value(expression, numbers)
            tries.append(f"{expression}={self._shown(worth)}")
            if careless or worth == prompt.data["target"]:
                break
        return ",".join(tries)

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
        longest_try = used * digits + used - 1 + 1 + worth + 1
        return count * digits + count + worth + 1, longest_try * len(self._expressions([1] * count))

    def _shown(self, number: int | None) -> str:
        return f"{number:0{len(str(self.config.largest**self.config.used))}}"

    def _expressions(self, numbers: Sequence[int]) -> list[str]:
        used: int = self.config.used
        return [
            "".join(chain.from_iterable(zip_longest(map(str, some), operations, fillvalue="")))
            for some in combinations(numbers, used)
            for operations in product("+-*", repeat=used - 1)
        ]
