"""Bodies of functions with unit tests: `+3*2-1=` asks for `return (x+3)*2-1`, steps that are done from left to right.

Tests decide, in a process where code can do no harm (`offbeat_recipes.library.code`). The careless hand leaves out the brackets.
"""

from __future__ import annotations

import re
from operator import add, mul, sub
from typing import TYPE_CHECKING, Any, cast

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.chars import CharTask
from offbeat_trainer import Score
from offbeat_trainer.data.loading import load_object
from offbeat_trainer.errors import PlanRefused
from offbeat_trainer.rollouts.scorer import FunctionScorer, find_reward

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np

    from offbeat_recipes.tasks.chars import Past
    from offbeat_trainer import Prompt, Scorer, Trajectory
    from offbeat_trainer.config import RewardConfig

REWARD = "offbeat_recipes.library.code:unit_tests"
_OPERATIONS = {"+": add, "-": sub, "*": mul}
_ARGUMENTS = (-7, 0, 1, 12)


class CodeTask(CharTask):
    """Functions of `config.steps` steps, each of which adds, takes away or multiplies by a digit; all of them need brackets."""

    alphabet = "0123456789+-*=()x return"

    def ask(self, rng: np.random.Generator) -> tuple[str, dict[str, object]]:
        """Draw steps, of which a sum is the first and a product the last, and work out what tests expect of them."""
        between = rng.choice(list(_OPERATIONS), size=self.config.steps - 2)
        operations = [str(one) for one in (rng.choice(["+", "-"]), *between, "*")]
        steps = [(one, int(rng.integers(2, 10))) for one in operations]
        values = list(_ARGUMENTS)
        for operation, number in steps:
            values = [_OPERATIONS[operation](value, number) for value in values]
        tests = [f"assert f({x}) == {y}" for x, y in zip(_ARGUMENTS, values, strict=True)]
        return "".join(f"{operation}{number}" for operation, number in steps) + "=", {"tests": tests}

    def say(self, prompt: Prompt, past: Past, rng: np.random.Generator, *, careless: bool) -> str:
        """Return the body, with brackets around a sum that is multiplied; a careless hand leaves them out."""
        del past, rng
        body, is_sum = "x", False
        for operation, number in re.findall("([-+*])([0-9])", prompt.text):
            if operation == "*" and is_sum and not careless:
                body = f"({body})"
            body, is_sum = f"{body}{operation}{number}", operation != "*"
        return f"return {body}"

    def lengths(self) -> tuple[int, int]:
        """See `CharTask.lengths`."""
        return 2 * self.config.steps + 1, len("return x") + 4 * self.config.steps

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Return what the tests say of one completion by itself; runs ask `scorer`."""
        [reward] = cast("Any", load_object(REWARD))(
            [self._function(trajectory.token_ids.tolist())], [prompt.data["tests"]]
        )
        return Score(reward=reward, correct=reward == 1)

    def scorer(self, config: RewardConfig, log: Path) -> Scorer:
        """Return what runs the tests, those of a group's completions together; it prints to `log`.

        Raises:
            TaskError: code cannot be locked up on this machine.
        """
        try:
            reward = find_reward(REWARD, 1.0, {"tests": ""})
        except PlanRefused as error:
            raise TaskError(f"task: {error}") from error
        return FunctionScorer((reward,), config, decode=self._function, correct_at=None, log=log)

    def _function(self, token_ids: Sequence[int]) -> str:
        return f"def f(x):{self.decode(token_ids)}"
