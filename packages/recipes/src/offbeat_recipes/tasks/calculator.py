"""Problems that a tiny model cannot work out, and a calculator that can: `47*86+29=`, from left to right.

    policy        47*86      calculator  4042;
    policy        4042+29    calculator  4071;
    policy        :4071      right

The calculator shows four digits, and `????` for what it cannot read or show. The reward is exact and looks at the result alone, what
stands after the `:`. The worked examples of the warm-up come from an impatient hand: a share `guess` of them writes down some number
at once. Greedily, a policy that imitates it guesses, and is never right; what asking is worth, reinforcement learning has to find out.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.chars import CharTask
from offbeat_recipes.tasks.rows import Stream, stream
from offbeat_rollout import Finish
from offbeat_trainer import Action, Example, Feedback, Prompt, Score

if TYPE_CHECKING:
    import numpy as np

    from offbeat_recipes.tasks.config import CalculatorConfig
    from offbeat_trainer import Trajectory

RESULT = ":"
SHOWN_END = ";"
UNREADABLE = "????"
OPERATIONS = "+*"
ALPHABET = f"0123456789{OPERATIONS}={RESULT}{SHOWN_END}?"
MAX_PROMPT_TOKENS = len("47*86+29=")
# Two calls and the result, each with its end token, and what the calculator shows after each call.
MAX_ANSWER_TOKENS = len("47*86") + len("4042+29") + len(":4071") + 3 + 2 * len("4042;")
_DIGITS = 4
_CALL = re.compile(r"(\d+)([+*])(\d+)")
_DRAWS = 20_000


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
    """Problems `a o b + c` of two-digit numbers, o one of `+*`, with their answers in four digits.

    Which ones are held out is decided by a digest of the problem, whatever the seed.
    """

    def __init__(
        self, config: CalculatorConfig, model_path: str, seed: int, *, trust_remote_code: bool = False
    ) -> None:
        """Check `config`; `seed` decides the order of prompts, `model_path` names a model instead of a fresh one.

        Its tokens are compared with this task's, and no code of the folder runs.

        Raises:
            TaskError: a share or a shape that cannot be.
        """
        if not 0 < config.held_out_fraction < 1:
            raise TaskError(
                f"task.held_out_fraction: expected more than 0 and less than 1, got {config.held_out_fraction}"
            )
        del trust_remote_code
        super().__init__(config, ALPHABET, model_path)
        self.max_prompt_tokens = MAX_PROMPT_TOKENS
        self.max_answer_tokens = MAX_ANSWER_TOKENS
        self._config = config
        self._seed = seed

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Return `num_prompts` training prompts; a pure function of seed and step."""
        rng = stream(self._seed, Stream.PROMPTS, step)
        return [self._prompt(*self._draw(rng, held_out=False)) for _ in range(num_prompts)]

    def validation_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return `num_prompts` held-out prompts, the same whatever the run's seed."""
        rng = stream(0, Stream.HELD_OUT)
        return [self._prompt(*self._draw(rng, held_out=True)) for _ in range(num_prompts)]

    def examples(self, step: int, num_examples: int) -> list[Example]:
        """Return worked examples of training prompts, a share `guess` of them guessed; the calculator's part is not trained."""
        rng = stream(self._seed, Stream.EXAMPLES, step)
        return [self._example(rng) for _ in range(num_examples)]

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Return 1 for one whose last turn is the exact result, else 0: for runs without the environment."""
        last = self.decode(trajectory.turns[-1].completion.token_ids.tolist()) if trajectory.turns else ""
        right = trajectory.finish is Finish.STOP and last == f"{RESULT}{prompt.data['answer']}"
        return Score(reward=float(right), correct=right)

    def _example(self, rng: np.random.Generator) -> Example:
        problem, answer = self._draw(rng, held_out=False)
        first, last = problem[:5], problem[5:]
        result = shown(first)
        guessed = bool(rng.random() < self._config.guess)
        said = [f"{RESULT}{rng.integers(10**_DIGITS):0{_DIGITS}}"]
        if not guessed:
            said = [first, result + last, RESULT + answer]
        heard = [shown(call) + SHOWN_END for call in said[:-1]]
        ids: list[int] = []
        trained: list[bool] = []
        for place, text in enumerate(said):
            turn = (*self._encode(text), *self.stop_token_ids())
            ids += turn
            trained += [True] * len(turn)
            if place < len(heard):
                ids += self._encode(heard[place])
                trained += [False] * len(heard[place])
        return Example(
            prompt_ids=self._encode(f"{problem}="), completion_ids=tuple(ids), trained=tuple(trained)
        )

    def _prompt(self, problem: str, answer: str) -> Prompt:
        text = f"{problem}="
        return Prompt(
            uid=f"calculator:{problem}", text=text, token_ids=self._encode(text), data={"answer": answer}
        )

    def _is_held_out(self, problem: str) -> bool:
        share = int.from_bytes(hashlib.sha256(problem.encode()).digest()[:8], "big") / 2**64
        return share < self._config.held_out_fraction

    def _draw(self, rng: np.random.Generator, *, held_out: bool) -> tuple[str, str]:
        """Draw a problem and its answer."""
        for _ in range(_DRAWS):
            left, right, last = (int(number) for number in rng.integers(10, 100, size=3))
            first = f"{left}{OPERATIONS[int(rng.integers(len(OPERATIONS)))]}{right}"
            problem = f"{first}+{last}"
            if self._is_held_out(problem) is held_out:
                return problem, shown(f"{int(shown(first))}+{last}")
        kind = "held out" if held_out else "left for training"
        raise TaskError(f"no problem is {kind} in {_DRAWS} draws; change task.held_out_fraction")
