"""Several turns: the policy speaks, an environment answers, and so on until one of them or a limit ends it.

    prompt, what `reset` says │ turn 0 │ what `step` says │ turn 1 │ ...
    read                      │ learned│ read             │ learned│

Tokens are only ever added: what was sampled is prompt to the next turn as it is, and what an environment says becomes tokens
once. Where it edits the history instead (`Feedback.context`) a new row begins, a sequence of its own. Each trajectory has an instance of the environment of its own, and a session, so that its turns meet the same replica.

Nothing is written down of a trajectory that is under way: an environment's state is its own. A run that goes on begins it anew,
with the same seeds. Within a process an interruption costs nothing: the turn at hand is continued from its tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from offbeat_rollout import Finish, GenerateRequest
from offbeat_trainer.config import EnvironmentConfig, OnFailure, RewardFrom
from offbeat_trainer.data.types import Group, Limit, Score, Trajectory, Turn, is_correct
from offbeat_trainer.errors import EnvironmentFailed, TrainerError, of_text, together
from offbeat_trainer.rollouts.environment import Action, Feedback, asked, checked
from offbeat_trainer.rollouts.frames import RAISED
from offbeat_trainer.rollouts.single import derive_seed
from offbeat_trainer.watch.watchdog import GENERATION, Timeline, Watchdog, now_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from offbeat_rollout import Completion, SamplingParams
    from offbeat_trainer.data.interface import Scorer
    from offbeat_trainer.data.types import Prompt
    from offbeat_trainer.rollouts.environment import Environment, Observation
    from offbeat_trainer.rollouts.single import GroupGenerator, Keep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSetup:
    """Where the policy acts: `make` makes an environment, the other two are the run's tokenizer.

    `encode(observation, last)` is called once for each observation, `last` being the token that the policy sampled before it, None
    for what `reset` returned; `encode_context` once for each `Feedback.context`; `close` ends what `make` has begun.
    """

    make: Callable[[], Environment]
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[Observation, int | None], Sequence[int]]
    encode_context: Callable[[Observation], Sequence[int]] | None = None
    close: Callable[[], Awaitable[None]] | None = None


@dataclass(slots=True, kw_only=True)
class _Talk:
    """One trajectory on its way: what was said so far, and what follows from it."""

    prompt: Prompt
    sampling: SamplingParams
    place: int
    until_s: float
    turns: list[Turn]
    feedbacks: list[Feedback]
    context: np.ndarray | None = None  # what the turn at hand begins a row with

    @property
    def session(self) -> str:
        return f"{self.place}/{self.prompt.uid}"

    def asked_with(self) -> tuple[int, ...]:
        """Return what the turn at hand is asked with, before what is observed: the row so far."""
        if self.context is not None:
            return tuple(self.context.tolist())
        row = self.ended(Finish.ABORT).rows[-1]
        prompt = self.prompt.token_ids if row.context is None else row.context.tolist()
        return (*prompt, *row.token_ids.tolist())

    def ended(self, finish: Finish | Limit) -> Trajectory:
        return Trajectory(turns=tuple(self.turns), finish=finish)


class MultiTurn:
    """Satisfies `Rollout` with an environment."""

    def __init__(
        self,
        generator: GroupGenerator,
        setup: EnvironmentSetup,
        config: EnvironmentConfig,
        *,
        scorer: Scorer | None = None,
        timeline: Timeline | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """Act in `setup`. `scorer` is asked where `config.reward_from` says so."""
        assert scorer is not None or config.reward_from is RewardFrom.ENVIRONMENT
        self._generator = generator
        self._setup = setup
        self._config = config
        self._scorer = scorer
        self._timeline = Timeline() if timeline is None else timeline
        self._watchdog = Watchdog() if watchdog is None else watchdog
        self._numbers = itertools.count()

    async def run(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        n: int,
        begun: tuple[Trajectory, ...] = (),
        keep: Keep | None = None,
    ) -> Group:
        """See `Rollout.run`. What was begun by another process is begun anew, and `keep` is never told of anything."""
        del begun, keep
        with self._timeline.generating(f"{next(self._numbers)}"):
            made = await together(
                {f"{prompt.uid} {place}": self._trajectory(prompt, sampling, place) for place in range(n)}
            )
        group = Group(prompt=prompt, trajectories=tuple(one for one, _ in made))
        own = tuple(score for _, score in made)
        if self._scorer is None or self._config.reward_from is RewardFrom.ENVIRONMENT:
            return replace(group, scores=own)
        with self._timeline.scoring():
            scored = await self._scorer.score(group)
        if (
            self._config.reward_from is RewardFrom.TASK
        ):  # the environment's rewards would still be credited turn by turn
            return replace(scored, trajectories=tuple(one.without_rewards() for one in scored.trajectories))
        return replace(group, scores=tuple(map(_sum, own, scored.scores)))

    async def interrupt(self) -> None:
        """See `Rollout.interrupt`: turns under way wait and are continued; environments know nothing of it."""
        await self._generator.interrupt()

    def go_on(self) -> None:
        """See `Rollout.go_on`."""
        self._generator.go_on()

    async def close(self) -> None:
        """See `Rollout.close`."""
        if self._setup.close is not None:
            await self._setup.close()
        if self._scorer is not None:
            await self._scorer.close()

    async def _trajectory(
        self, prompt: Prompt, sampling: SamplingParams, place: int
    ) -> tuple[Trajectory, Score]:
        """Return one trajectory with its score, begun anew as often as its environment may fail."""
        attempt = 0
        while True:
            try:
                return await self._attempt(prompt, sampling, place)
            except EnvironmentFailed as error:
                attempt += not error.innocent
                limit = self._config.max_attempts
                log.warning(
                    "environment of %s, trajectory %d: %s (attempt %d of %d)",
                    prompt.uid, place, error, attempt, limit,
                )  # fmt: skip
                if attempt < limit:
                    continue
                if self._config.on_failure is OnFailure.STOP:
                    raise TrainerError(
                        f"the environment of {prompt.uid}: {error}; environment.on_failure=drop would leave the group "
                        "out and go on"
                    ) from error
                raise

    async def _attempt(
        self, prompt: Prompt, sampling: SamplingParams, place: int
    ) -> tuple[Trajectory, Score]:
        limit_s = self._config.max_seconds
        talk = _Talk(
            prompt=prompt,
            sampling=sampling,
            place=place,
            until_s=now_s() + limit_s if limit_s else math.inf,
            turns=[],
            feedbacks=[],
        )
        environment = self._setup.make()
        try:
            trajectory = await self._talk(environment, talk)
        finally:
            if hasattr(environment, "close"):
                with suppress(EnvironmentFailed):  # its trajectory is over
                    await asked("close", getattr(environment, "close"))  # noqa: B009 - not every environment has one
        return trajectory, self._score(talk)

    async def _talk(self, environment: Environment, talk: _Talk) -> Trajectory:
        """Let policy and environment speak in turn until one of them, or a limit, ends it."""
        base = talk.sampling.seed
        seed = 0 if base is None else derive_seed(base, talk.prompt.uid, talk.place, "environment")
        said: Observation | Feedback = await asked("reset", environment.reset, talk.prompt, seed)
        if isinstance(said, Feedback):
            said, talk.context = (), await self._context(said.context or "")
        while True:
            observed = await self._observed(said, talk)
            before = talk.asked_with()
            room = len(talk.prompt.token_ids) + self._config.max_tokens - len(before) - len(observed)
            if room < 1:
                return talk.ended(Finish.LENGTH)
            completion = await self._turn(talk, (*before, *observed.tolist()), room)
            if completion is None:
                return talk.ended(Limit.SECONDS)
            action = await self._action(len(talk.turns), completion)
            feedback = checked(await asked("step", environment.step, action))
            self._watchdog.progress(GENERATION, f"turn {len(talk.turns)} of {talk.session}")
            turn = Turn(
                completion=completion, observed=observed, reward=feedback.reward, context=talk.context
            )
            talk.turns.append(turn.without_past() if talk.turns and turn.context is None else turn)
            talk.feedbacks.append(feedback)
            ending = self._ending(talk, completion, feedback)
            if ending is not None:
                return talk.ended(ending)
            said, talk.context = feedback.observation, None
            if feedback.context is not None:
                said, talk.context = (), await self._context(feedback.context)

    async def _observed(self, said: Observation, talk: _Talk) -> np.ndarray:
        last = int(talk.turns[-1].completion.token_ids[-1]) if talk.turns else None
        return await self._tokens(said, lambda: self._setup.encode(said, last))

    async def _context(self, said: Observation) -> np.ndarray:
        encode = self._setup.encode_context
        if encode is None:
            raise TrainerError(
                "`Feedback.context` needs an `EnvironmentSetup.encode_context`, and there is none"
            )
        tokens = await self._tokens(said, lambda: encode(said))
        if not len(tokens):
            raise EnvironmentFailed(
                RAISED, "`Feedback.context` is empty: a turn is asked with at least one token"
            )
        return tokens

    async def _tokens(self, said: Observation, encode: Callable[[], Sequence[int]]) -> np.ndarray:
        try:
            return np.array(await of_text(encode), np.int32)
        except Exception as error:
            what = f"what it said, {said!r:.200}, cannot be made into tokens: {type(error).__name__}: {error}"
            raise EnvironmentFailed(RAISED, what) from error

    async def _turn(self, talk: _Talk, prompt_ids: tuple[int, ...], room: int) -> Completion | None:
        """Return the policy's next turn, of at most `room` tokens; None where the time is up before it ends."""
        sampling, number = talk.sampling, len(talk.turns)
        # The first turn's seed is that of a completion without environment: so one turn is one turn.
        parts = (talk.prompt.uid, talk.place) if not number else (talk.prompt.uid, talk.place, "turn", number)
        request = GenerateRequest(
            request_id=f"{number}/{talk.session}",
            prompt_ids=prompt_ids,
            sampling=replace(
                sampling,
                max_tokens=min(sampling.max_tokens, room),
                seed=None if sampling.seed is None else derive_seed(sampling.seed, *parts),
            ),
            session=talk.session,
        )
        if talk.until_s == math.inf:
            return await self._generator.turn(request)
        limit = asyncio.timeout(max(0.0, talk.until_s - now_s()))
        try:
            async with limit:
                return await self._generator.turn(request)
        except TimeoutError:
            if not limit.expired():
                raise
            return None

    async def _action(self, turn: int, completion: Completion) -> Action:
        ids = tuple(completion.token_ids.tolist())
        text = await of_text(lambda: self._setup.decode(ids))
        return Action(turn=turn, text=text, token_ids=ids, finish=completion.finish.value)

    def _ending(self, talk: _Talk, completion: Completion, feedback: Feedback) -> Finish | Limit | None:
        """Return why there is no other turn, or None if there is one."""
        if completion.finish is not Finish.STOP:  # what was cut off is no whole turn: nothing can follow it
            return completion.finish
        if feedback.done:
            return Finish.STOP
        if len(talk.turns) >= self._config.max_turns:
            return Limit.TURNS
        return Limit.SECONDS if now_s() >= talk.until_s else None

    def _score(self, talk: _Talk) -> Score:
        reward = math.fsum(one.reward for one in talk.feedbacks)
        parts: dict[str, float] = {}
        for one in talk.feedbacks:
            for name, value in one.parts.items():
                parts[name] = parts.get(name, 0.0) + value
        said = [one.correct for one in talk.feedbacks if one.correct is not None]
        return Score(reward=reward, correct=said[-1] if said else is_correct(reward, None), parts=parts)


def _sum(own: Score, of_task: Score) -> Score:
    """Return what environment and task together say; right is what the task calls right."""
    return Score(
        reward=own.reward + of_task.reward,
        correct=of_task.correct,
        parts={**own.parts, **of_task.parts, "environment": own.reward},
    )
