"""A task of one's own in a few lines: a program says what is asked, and what an answer is worth."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.config import GeneratedConfig
from offbeat_recipes.tasks.rows import Row, Stream, stream
from offbeat_recipes.tasks.text import ModelTask
from offbeat_trainer import Score
from offbeat_trainer.data.types import is_correct

if TYPE_CHECKING:
    import numpy as np

    from offbeat_recipes.tasks.config import TaskConfig
    from offbeat_recipes.tasks.text import Messages
    from offbeat_trainer import Example, Prompt, Trajectory

    _Asked: TypeAlias = tuple[str | Messages, Mapping[str, object]]

_DRAWS = 1000  # for one prompt, after which there are no more to be had


class Drawn(ABC):
    """Prompts that `ask` draws. One is held out by a digest of its `key`, whatever the seed: training never meets one. A step has none twice."""

    config: Any
    _seed: int

    @abstractmethod
    def ask(self, rng: np.random.Generator) -> tuple[str | Messages, Mapping[str, object]]:
        """Return one prompt, text or messages, drawn with `rng` alone, and what its reward needs to know of it: plain values."""

    @abstractmethod
    def _prompts_of(self, found: Mapping[str, _Asked]) -> list[Prompt]:
        """Return the prompts of what was asked, by their keys."""

    def key(self, asked: str | Messages, data: Mapping[str, object]) -> str:
        """Return what makes a prompt this one and no other: what is asked."""
        del data
        return str(asked)

    def is_held_out(self, key: str) -> bool:
        """Say whether the prompt of this `key` is for validation alone."""
        return _digest(key) < self.config.held_out_fraction * 16**16

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Return `num_prompts` different training prompts; a pure function of seed and step."""
        return self._drawn(stream(self._seed, Stream.PROMPTS, step), num_prompts, held_out=False)

    def validation_prompts(self, num_prompts: int) -> list[Prompt]:
        """Return `num_prompts` different held-out prompts, the same whatever the run's seed."""
        return self._drawn(stream(0, Stream.HELD_OUT), num_prompts, held_out=True)

    def _drawn(self, rng: np.random.Generator, count: int, *, held_out: bool) -> list[Prompt]:
        found: dict[str, _Asked] = {}
        for _ in range(count):
            for _ in range(_DRAWS):
                asked, data = self._asked(rng)
                key = self.key(asked, data)
                if self.is_held_out(key) is held_out and key not in found:
                    found[key] = asked, data
                    break
            else:
                kind = "held out" if held_out else "for training"
                raise TaskError(
                    f"task: {type(self).__name__} has not {count} different prompts {kind}; let `ask` make more, take fewer "
                    "(trainer.prompts_per_step, trainer.validation_prompts), or change task.held_out_fraction"
                )
        return self._prompts_of(found)

    def _asked(self, rng: np.random.Generator) -> _Asked:
        """Return what `ask` gives.

        Raises:
            TaskError: it failed, with file and line, or gave something else.
        """
        try:
            made = cast("object", self.ask(rng))
        except Exception as error:  # whatever a user's program raises
            place = extract_tb(error.__traceback__)[-1]
            cause = f"{type(error).__name__}: {error}, {place.filename}, line {place.lineno}"
            raise TaskError(f"task: `ask` of {type(self).__name__} raised {cause}") from error
        pair = cast("tuple[object, ...]", made) if isinstance(made, tuple) else ()
        if len(pair) != 2 or not isinstance(pair[0], str | list) or not isinstance(pair[1], Mapping):
            raise TaskError(
                f"task: `ask` of {type(self).__name__} must return a text or messages, and a dict; got {made!r:.200}"
            )
        return cast("_Asked", pair)


class GeneratedTask(ModelTask, Drawn):
    """Prompts that `ask` makes, scored by `reward`, for the model in `model.path`; `task=file.py:Class` trains on one."""

    Config: ClassVar[type[TaskConfig]] = GeneratedConfig

    def __init__(
        self, config: GeneratedConfig, model_path: str, seed: int, *, trust_remote_code: bool = False
    ) -> None:
        """Keep what is given; `config` is of the class `Config`, and `self.config` for subclasses."""
        super().__init__(config, model_path, trust_remote_code=trust_remote_code)
        self.config = config
        self._seed = seed

    @abstractmethod
    def reward(self, completion: str, data: Mapping[str, object]) -> float:
        """Return what `completion` is worth as an answer to the prompt with `data`; 1 is right, 0 is wrong."""

    def examples(self, step: int, num_examples: int) -> list[Example]:
        """Return training prompts with what `answer` says to them; a pure function of seed and step."""
        rng = stream(self._seed, Stream.EXAMPLES, step)
        return self._worked(self._drawn(rng, num_examples, held_out=False))

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Return the `reward` of the text of `trajectory`."""
        reward = self.reward(self.decode(trajectory.token_ids.tolist()), prompt.data)
        return Score(reward=reward, correct=is_correct(reward, None))

    def _prompts_of(self, found: Mapping[str, _Asked]) -> list[Prompt]:
        rows = [
            (Row(path=type(self).__name__, number=_digest(key), values=data), asked)
            for key, (asked, data) in found.items()
        ]
        prompts = [one.prompt for one in self.maker.load(rows)]
        longest = max(prompts, key=lambda one: len(one.token_ids), default=None)
        if longest is not None and len(longest.token_ids) > self.max_prompt_tokens:
            raise TaskError(
                f"task: a prompt of {type(self).__name__} has {len(longest.token_ids)} tokens, more than task.max_prompt_tokens "
                f"{self.max_prompt_tokens}; raise that, or ask for less: {longest.text!r:.200}"
            )
        return prompts


def _digest(key: str) -> int:
    return int(hashlib.sha256(key.encode()).hexdigest()[:16], 16)
