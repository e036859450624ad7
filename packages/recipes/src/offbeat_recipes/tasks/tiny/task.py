"""What tasks of a tiny model share: prompts that are drawn, an environment that answers, and worked examples of a hand that errs."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.chars import CharTask
from offbeat_recipes.tasks.generated import Drawn
from offbeat_recipes.tasks.rows import Stream, stream
from offbeat_rollout import Finish
from offbeat_trainer import Action, Example, Feedback, Prompt, Score

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Protocol, TypeAlias

    import numpy as np

    from offbeat_recipes.tasks.config import TinyTaskConfig
    from offbeat_trainer import Trajectory

    Past: TypeAlias = Sequence[tuple[str, str]]

    class Answers(Protocol):
        """An environment of plain functions that says nothing before the first turn."""

        def reset(self, prompt: Prompt, seed: int) -> str: ...

        def step(self, action: Action) -> Feedback: ...


class TinyTask(CharTask, Drawn):
    """A subclass says what is asked (`ask`), what a hand says to it (`say`), how long that is (`lengths`), and which environment answers.

    A share `careless` of the worked examples come from a careless hand. Greedily, a policy that imitates both is careless; what care is
    worth, reinforcement learning has to find out.
    """

    characters: ClassVar[str]
    environment: ClassVar[Callable[[], Answers] | None] = None
    """None for a task of one turn that something else scores."""

    def __init__(
        self, config: TinyTaskConfig, model_path: str, seed: int, *, trust_remote_code: bool = False
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
        super().__init__(config, self.characters, model_path)
        self.config: Any = config  # of the subclass's own class
        self.max_prompt_tokens, self.max_answer_tokens = self.lengths()
        self._held_out_fraction = config.held_out_fraction
        self._seed = seed

    @abstractmethod
    def ask(self, rng: np.random.Generator) -> tuple[str, Mapping[str, object]]:
        """Return a prompt's text, drawn with `rng` alone, and what the environment needs to know of it: plain values."""

    @abstractmethod
    def say(self, prompt: Prompt, past: Past, rng: np.random.Generator, *, careless: bool) -> str:
        """Return what a hand says to `prompt` after `past`: its turns before, each with what the environment answered."""

    @abstractmethod
    def lengths(self) -> tuple[int, int]:
        """Return the numbers of tokens of the longest prompt, and of a careful hand's longest turns with what they are answered."""

    def examples(self, step: int, num_examples: int) -> list[Example]:
        """Return worked examples of training prompts; what the environment says in them is not trained."""
        return self._worked(stream(self._seed, Stream.EXAMPLES, step), num_examples, held_out=False)

    def validation_examples(self, num_examples: int) -> list[Example]:
        """Return worked examples of held-out prompts, the same whatever the run's seed."""
        return self._worked(stream(0, Stream.HELD_OUT, 1), num_examples, held_out=True)

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Return what the environment says of the turns of `trajectory`: for tasks of one turn, and for runs without the environment."""
        assert self.environment is not None
        environment, rewards = self.environment(), 0.0
        environment.reset(prompt, 0)
        for place, turn in enumerate(trajectory.turns):
            feedback = environment.step(self._action(place, turn.completion.token_ids.tolist(), turn.completion.finish))
            rewards += feedback.reward
            if feedback.done:
                return Score(reward=rewards, correct=feedback.correct)
        return Score(reward=rewards, correct=False)

    def _worked(self, rng: np.random.Generator, num_examples: int, *, held_out: bool) -> list[Example]:
        return [self._example(prompt, rng) for prompt in self._drawn(rng, num_examples, held_out=held_out)]

    def _example(self, prompt: Prompt, rng: np.random.Generator) -> Example:
        """Let the hand and the environment speak in turn until that is done."""
        careless = bool(rng.random() < self.config.careless)
        environment, past = self.environment and self.environment(), list[tuple[str, str]]()
        if environment:
            environment.reset(prompt, 0)
        ids, trained = list[int](), list[bool]()
        while True:
            said = self.say(prompt, past, rng, careless=careless)
            turn = (*self._encode(said), *self.stop_token_ids())
            ids += turn
            trained += [True] * len(turn)
            feedback = environment and environment.step(self._action(len(past), turn, Finish.STOP))
            if feedback is None or feedback.done:
                return Example(prompt_ids=prompt.token_ids, completion_ids=tuple(ids), trained=tuple(trained))
            past.append((said, str(feedback.observation)))
            answer = self._encode(past[-1][1])
            ids += answer
            trained += [False] * len(answer)

    def _action(self, turn: int, token_ids: Sequence[int], finish: Finish) -> Action:
        return Action(turn=turn, text=self.decode(token_ids), token_ids=tuple(token_ids), finish=finish.value)

    def _prompts_of(self, found: Mapping[str, Any]) -> list[Prompt]:
        name = self.config.name
        return [
            Prompt(uid=f"{name}:{digest}", text=text, token_ids=self._encode(text), data=data)
            for digest, (text, data) in found.items()
        ]
