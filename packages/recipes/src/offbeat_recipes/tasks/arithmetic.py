"""Sums to be worked out column by column, from the right: `37+48=` is `7+8=15,3+4=7+1=8:85`.

The reward is exact and looks at the result alone: what stands after the `:` must be the sum, and the completion must
have ended by itself. The careless hand leaves out every carry: it is right about as often as sums need none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.chars import CharTask
from offbeat_rollout import Finish
from offbeat_trainer import Prompt, Score

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from offbeat_recipes.tasks.chars import Past
    from offbeat_recipes.tasks.text import Messages
    from offbeat_trainer import Trajectory

COLUMN_ENDS = ",;/|"  # one mark of its own after each column but the last: a tiny model sees where it is
RESULT = ":"
ALPHABET = f"0123456789+={COLUMN_ENDS}{RESULT}"
MAX_LEVEL = len(COLUMN_ENDS) + 1


def max_prompt_tokens(level: int) -> int:
    """Return the length of every prompt of `level`: two operands, `+` and `=`."""
    return 2 * level + 2


def max_answer_tokens(level: int) -> int:
    """Return the length of the longest right answer of `level`, its end token included."""
    # `9+9=18` and a mark for each column, `+1=19` for each but the first, the sum, the end
    return 7 * level + 5 * (level - 1) + (level + 1) + 1


def worked_answer(left: int, right: int, *, forgetful: bool) -> str:
    """Return the worked sum of two operands of equally many digits; a forgetful hand leaves out every carry.

    Otherwise the result is the sum.
    """
    carry, columns, digits = 0, list[str](), ""
    pairs = list(zip(reversed(str(left)), reversed(str(right)), strict=True))
    for place, (one, other) in enumerate(pairs):
        total = int(one) + int(other)
        column = f"{one}+{other}={total}"
        if carry and not forgetful:
            total += 1
            column += f"+1={total}"
        last = place == len(pairs) - 1
        columns.append(column + (RESULT if last else COLUMN_ENDS[place]))
        digits = f"{total if last else total % 10}{digits}"
        carry = total // 10
    return "".join(columns) + digits


def is_right(text: str, left: int, right: int) -> bool:
    """Say whether the answer `text` ends in `:` and the exact sum, with one `:` in all."""
    work, mark, result = text.partition(RESULT)
    return mark == RESULT and RESULT not in work and result == str(left + right)


class ArithmeticTask(CharTask):
    """Additions of two `level`-digit numbers; which ones are held out is decided by the operands, in either order."""

    alphabet = ALPHABET

    def lengths(self) -> tuple[int, int]:
        """See `CharTask.lengths`; what cannot be is refused here.

        Raises:
            TaskError: a level that cannot be, or a share that leaves nothing for validation.
        """
        level, share = self.config.level, self.config.held_out_fraction
        if not 1 <= level <= MAX_LEVEL:
            raise TaskError(f"task.level: expected 1 to {MAX_LEVEL} digits, got {level}")
        if not self.num_available(held_out=True):
            raise TaskError(
                f"task.held_out_fraction {share:g} leaves none of {self._num_pairs} sums for validation; raise it, or task.level"
            )
        return max_prompt_tokens(level), max_answer_tokens(level)

    @property
    def num_train_prompts(self) -> int:
        """How many different prompts may be asked for at once."""
        return self.num_available(held_out=False)

    @property
    def _num_pairs(self) -> int:
        numbers = 9 * 10 ** (self.config.level - 1)
        return numbers * (numbers + 1) // 2  # in either order they are one

    def ask(self, rng: np.random.Generator) -> tuple[str, dict[str, object]]:
        """Draw a pair in which every column but the last carries with probability `carry_share`."""
        left = right = carry = 0
        for place in range(self.config.level):
            last = place == self.config.level - 1
            wanted = None if last else bool(rng.random() < self.config.carry_share)
            one, other = _draw_column(rng, carry, wanted, lowest=int(last))
            left += one * 10**place
            right += other * 10**place
            carry = int(one + other + carry >= 10)
        return f"{left}+{right}=", {"left": left, "right": right, "answer": str(left + right)}

    def key(self, asked: str | Messages, data: Mapping[str, object]) -> str:
        """Return the smaller operand and the larger."""
        del asked
        return "+".join(map(str, sorted((cast("int", data["left"]), cast("int", data["right"])))))

    def say(self, prompt: Prompt, past: Past, rng: np.random.Generator, *, careless: bool) -> str:
        """Return the worked sum; a careless hand leaves out every carry."""
        del past, rng
        return worked_answer(*map(int, prompt.text[:-1].split("+")), forgetful=careless)

    def validation_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return up to `num_prompts` different held-out prompts, the same whatever the run's seed."""
        return super().validation_prompts(min(num_prompts, self.num_available(held_out=True)))

    def vote(self, text: str) -> str | None:
        """Return the sum that `text` ends in."""
        _, mark, result = text.rpartition(RESULT)
        return result if mark else None

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Return 1 for one that ended by itself with the exact sum, else 0."""
        left, right = prompt.data["left"], prompt.data["right"]
        assert isinstance(left, int)
        assert isinstance(right, int)
        token_ids = trajectory.token_ids.tolist()
        ended = trajectory.finish is Finish.STOP and token_ids[-1:] == [*self.stop_token_ids()]
        # The end token is cut off first: decoded with it, `:12<pad><eos>` must not pass for `:12`.
        right_answer = ended and is_right(self._raw(token_ids[:-1]), left, right)
        return Score(reward=float(right_answer), correct=right_answer)

    def num_available(self, *, held_out: bool) -> int:
        """Return how many different prompts may be asked for at once."""
        # Three quarters of the pool at most: drawing with rejection stays quick, also where carries make some pairs rare.
        share = self.config.held_out_fraction if held_out else 1 - self.config.held_out_fraction
        return int(self._num_pairs * share * 3 / 4)


def _draw_column(
    rng: np.random.Generator, carry: int, wanted: bool | None, *, lowest: int
) -> tuple[int, int]:
    """Draw the two digits of a column that carries as `wanted` (None = either), with `carry` coming in."""
    while True:
        one, other = (int(value) for value in rng.integers(lowest, 10, size=2))
        if wanted is None or (one + other + carry >= 10) is wanted:
            return one, other
