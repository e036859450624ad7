"""Sums to be worked out column by column, from the right: `37+48=` is `7+8=15,3+4=7+1=8:85`.

The reward is exact and looks at the result alone: what stands after the `:` must be the sum, and the completion must
have ended by itself. The worked examples of the warm-up come from a forgetful hand: a share `forget_carry` of them
leaves out every carry. Greedily, a policy that imitates it is right about as often as sums need no carry; what carries
are worth, reinforcement learning has to find out.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.chars import CharTask
from offbeat_recipes.tasks.rows import Stream, stream
from offbeat_rollout import Finish
from offbeat_trainer import Example, Prompt, Score

if TYPE_CHECKING:
    import numpy as np

    from offbeat_recipes.tasks.config import ArithmeticConfig
    from offbeat_trainer import Trajectory

COLUMN_ENDS = ",;/|"  # one mark of its own after each column but the last: a tiny model sees where it is
RESULT = ":"
ALPHABET = f"0123456789+={COLUMN_ENDS}{RESULT}"
MAX_LEVEL = len(COLUMN_ENDS) + 1
_DRAWS, _DRAWS_PER_PAIR = 20_000, 1_000  # after which a pair is not to be had


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
    """Additions of two `level`-digit numbers.

    Which ones are held out is decided by a digest of the operands (in either order), whatever the seed: warm-up
    and training never meet one.
    """

    def __init__(
        self, config: ArithmeticConfig, model_path: str, seed: int, *, trust_remote_code: bool = False
    ) -> None:
        """Check `config`; `seed` decides the order of prompts, `model_path` names a model instead of a fresh one.

        Its tokens are compared with this task's, and no code of the folder runs.

        Raises:
            TaskError: a level, a share or a shape that cannot be.
        """
        if not 1 <= config.level <= MAX_LEVEL:
            raise TaskError(f"task.level: expected 1 to {MAX_LEVEL} digits, got {config.level}")
        if not 0 < config.held_out_fraction < 1:
            raise TaskError(
                f"task.held_out_fraction: expected more than 0 and less than 1, got {config.held_out_fraction}"
            )
        del trust_remote_code
        super().__init__(config, ALPHABET, model_path)
        self.max_prompt_tokens = max_prompt_tokens(config.level)
        self.max_answer_tokens = max_answer_tokens(config.level)
        self._config = config
        self._seed = seed
        self._num_pairs = (9 * 10 ** (config.level - 1)) ** 2
        if not self.num_available(held_out=True):
            raise TaskError(
                f"task.held_out_fraction {config.held_out_fraction:g} leaves none of {self._num_pairs} sums for validation; "
                "raise it, or task.level"
            )

    @property
    def num_train_prompts(self) -> int:
        """How many different prompts may be asked for at once."""
        return self.num_available(held_out=False)

    def is_held_out(self, left: int, right: int) -> bool:
        """Say whether this sum is for validation alone."""
        key = f"{min(left, right)}+{max(left, right)}".encode()
        share = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64
        return share < self._config.held_out_fraction

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Return `num_prompts` different training prompts; a pure function of seed and step."""
        rng = stream(self._seed, Stream.PROMPTS, step)
        return [self._prompt(*pair) for pair in self._distinct(rng, num_prompts, held_out=False)]

    def validation_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return up to `num_prompts` different held-out prompts, the same whatever the run's seed."""
        count = min(num_prompts, self.num_available(held_out=True))
        rng = stream(0, Stream.HELD_OUT)
        return [self._prompt(*pair) for pair in self._distinct(rng, count, held_out=True)]

    def examples(self, step: int, num_examples: int) -> list[Example]:
        """Return worked examples of training prompts, a share `forget_carry` of them forgetful."""
        rng = stream(self._seed, Stream.EXAMPLES, step)
        return self._examples(rng, num_examples, held_out=False)

    def validation_examples(self, num_examples: int) -> list[Example]:
        """Return worked examples of held-out sums, forgetful as those of training, the same whatever the run's seed."""
        return self._examples(stream(0, Stream.HELD_OUT, 1), num_examples, held_out=True)

    def _examples(self, rng: np.random.Generator, num_examples: int, *, held_out: bool) -> list[Example]:
        made: list[Example] = []
        for _ in range(num_examples):
            left, right = self._draw(rng, held_out=held_out)
            answer = worked_answer(left, right, forgetful=bool(rng.random() < self._config.forget_carry))
            made.append(
                Example(
                    prompt_ids=self._encode(f"{left}+{right}="),
                    completion_ids=(*self._encode(answer), *self.stop_token_ids()),
                )
            )
        return made

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

    def _prompt(self, left: int, right: int) -> Prompt:
        text = f"{left}+{right}="
        return Prompt(
            uid=f"arithmetic:{left}+{right}",
            text=text,
            token_ids=self._encode(text),
            data={"left": left, "right": right, "answer": str(left + right)},
        )

    def num_available(self, *, held_out: bool) -> int:
        """Return how many different prompts may be asked for at once."""
        # Half of the pool at most: drawing with rejection stays quick, also where carries make some pairs rare.
        share = self._config.held_out_fraction if held_out else 1 - self._config.held_out_fraction
        return int(self._num_pairs * share / 2)

    def _distinct(self, rng: np.random.Generator, count: int, *, held_out: bool) -> list[tuple[int, int]]:
        if count > self.num_available(held_out=held_out):
            raise TaskError(
                f"{count} different prompts asked of a pool of about {2 * self.num_available(held_out=held_out)}; "
                "raise task.level or take fewer prompts"
            )
        pairs: dict[tuple[int, int], None] = {}  # a set that keeps the order of drawing
        for _ in range(_DRAWS + _DRAWS_PER_PAIR * count):
            if len(pairs) == count:
                return list(pairs)
            pairs[self._draw(rng, held_out=held_out)] = None
        raise TaskError(
            f"{count} different prompts asked, and {len(pairs)} were found; raise task.level, take fewer prompts, or bring "
            "task.carry_share nearer to 0.5"
        )

    def _draw(self, rng: np.random.Generator, *, held_out: bool) -> tuple[int, int]:
        """Draw a pair in which every column but the last carries with probability `carry_share`."""
        for _ in range(_DRAWS):
            left = right = carry = 0
            for place in range(self._config.level):
                last = place == self._config.level - 1
                wanted = None if last else bool(rng.random() < self._config.carry_share)
                one, other = _draw_column(rng, carry, wanted, lowest=int(last))
                left += one * 10**place
                right += other * 10**place
                carry = int(one + other + carry >= 10)
            if self.is_held_out(left, right) is held_out:
                return left, right
        kind = "held out" if held_out else "left for training"
        raise TaskError(
            f"no sum is {kind} in {_DRAWS} draws; raise task.level or change task.held_out_fraction"
        )


def _draw_column(
    rng: np.random.Generator, carry: int, wanted: bool | None, *, lowest: int
) -> tuple[int, int]:
    """Draw the two digits of a column that carries as `wanted` (None = either), with `carry` coming in."""
    while True:
        one, other = (int(value) for value in rng.integers(lowest, 10, size=2))
        if wanted is None or (one + other + carry >= 10) is wanted:
            return one, other
