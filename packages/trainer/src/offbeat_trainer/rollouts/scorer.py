"""Groups get their scores: by functions of users, or by the task itself. What fails is said, tried again, and dropped."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import sys
import threading
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

from offbeat_trainer.config import OnFailure, RewardConfig
from offbeat_trainer.data.loading import load_object
from offbeat_trainer.data.types import UNSCORED, Score, is_correct
from offbeat_trainer.errors import LoadError, PlanRefused, RewardFailed, TrainerError, of_text, together
from offbeat_trainer.rollouts.client import CallProcess
from offbeat_trainer.rollouts.frames import NO_NUMBER, NONE_APPLIES, RAISED, READY, TIMED_OUT, Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from offbeat_trainer.data.types import Group, Prompt, Trajectory
    from offbeat_trainer.rollouts.frames import Answer

    _Found = Sequence[Score | RewardFailed]
    """Of a group, one per completion."""

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Before the second attempt of a call; each further one waits twice as long."""
ANSWERED_TOGETHER = 16  # groups that get their scores before a step that has all of its own begins
_LEAST_SCORED = 2
"""Completions of a group that must have a score for it to be trained: fewer cannot be compared."""
ONE: tuple[str, ...] = ("prompt", "completion", "completion_ids", "finish", "row")
MANY: tuple[str, ...] = ("prompts", "completions", "completion_ids", "finishes", "rows")
_OF_TRL = frozenset({"trainer_state", "log_extra", "log_metric"})
TRL = "trl:"
"""Before the path of a function that is to be called as TRL calls it where prompts are messages."""
VERL: tuple[str, ...] = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What verl calls a `compute_score` with."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function by its import path, how much it counts, and what it is called with, by the names of its parameters.

    One completion a call: `prompt`, `completion` (texts), `completion_ids`, `finish` ("stop", "length", "abort"), `row` (all
    columns) and every column of the data by its name; it returns a number. One group a call, if it has a parameter
    `completions`: `prompts`, `completions`, `completion_ids`, `finishes`, `rows` and the columns are lists with one entry a
    completion; it returns as many numbers (the convention of TRL's reward functions). None for a completion says that the
    reward does not apply to it. `**kwargs` gets what is left. A coroutine function is awaited.

    `style` "trl": where the data's `prompt` is a list of messages, prompts and completions are such lists. "verl": by the names of
    `VERL`, the truth being the row's `ground_truth` or that of its `reward_model`; it may return a mapping with a `score`.
    `wants` are the names it is called with, None for all there are; `batched`: with a whole group at once.
    """

    path: str
    weight: float
    batched: bool
    wants: frozenset[str] | None
    style: Literal["", "trl", "verl"] = ""

    @property
    def name(self) -> str:
        """The function's name, for metrics and messages."""
        return self.path.rpartition(":")[2]

    def calls(self, group: Group, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return the arguments of each call that scores `group`, whose completions read `texts`."""
        asks_ids = self.wants is None or "completion_ids" in self.wants
        ones: list[dict[str, Any]] = [
            {
                **group.prompt.data,
                "prompt": group.prompt.text,
                "completion": text,
                "completion_ids": completion.token_ids.tolist() if asks_ids else [],
                "finish": completion.finish.value,
                "row": dict(group.prompt.data),
            }
            for completion, text in zip(group.trajectories, texts, strict=True)
        ]
        if self.style:
            ones = [one | (_as_trl(one) if self.style == "trl" else _as_verl(one)) for one in ones]
        if not self.batched:
            return [self._wanted(one) for one in ones]
        plural = dict(zip(ONE, MANY, strict=True))
        return [self._wanted({plural.get(name, name): [one[name] for one in ones] for name in ones[0]})]

    def _wanted(self, all_there_is: dict[str, Any]) -> dict[str, Any]:
        if self.wants is None:
            return all_there_is
        return {name: value for name, value in all_there_is.items() if name in self.wants}


def _as_trl(one: dict[str, Any]) -> dict[str, Any]:
    prompt = one["row"].get("prompt")
    if isinstance(prompt, str) or prompt is None:
        return {}
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": one["completion"]}]}


def _as_verl(one: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = one["row"]
    truth = row["ground_truth"] if "ground_truth" in row else row["reward_model"]["ground_truth"]
    source, extra = row.get("data_source", ""), row.get("extra_info")
    return dict(zip(VERL, (source, one["completion"], truth, extra), strict=True))


def find_reward(path: str, weight: float, columns: Mapping[str, object]) -> Reward:
    """Return the reward function at `path`, which may begin with `TRL`, for data with `columns`.

    Raises:
        PlanRefused: it cannot be imported, is no function, or asks for what is not there.
    """
    style: Literal["", "trl", "verl"] = "trl" if path.startswith(TRL) else ""
    path = path.removeprefix(TRL)
    try:
        function = load_object(path)
    except LoadError as error:
        raise PlanRefused(str(error)) from error
    if not callable(function):
        raise PlanRefused(f"{path} is no function but {function!r}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise PlanRefused(f"{path} does not say what it is called with: {error}; wrap it in a def") from error
    batched = any(one.name == "completions" for one in parameters)
    there = {*(MANY if batched else ONE), *columns}
    if any(one.name == "solution_str" for one in parameters) and "solution_str" not in columns:
        if not {"ground_truth", "reward_model"} & columns.keys():
            raise PlanRefused(
                f"{path} is called as verl does, and the data have neither a column ground_truth nor reward_model"
            )
        style, there = "verl", {*there, *VERL}
    for one in parameters:
        by_name = one.kind in _BY_NAME and (one.name in there or one.default is not one.empty)
        if not by_name and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            trl = ", which only TRL has" if one.name in _OF_TRL else ""
            raise PlanRefused(
                f"{path} asks for {one.name!r}{trl}; a reward is called by the names of its parameters, and there are "
                f"{', '.join(MANY if batched else ONE)} and the columns {', '.join(columns) or '(none)'}"
            )
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    wants = frozenset(one.name for one in parameters) & there
    if style == "verl":
        takes_all = False  # its own names and no others
    return Reward(path=path, weight=weight, batched=batched, wants=None if takes_all else wants, style=style)


class FunctionScorer:
    """Satisfies `Scorer` with reward functions, called in processes of their own; see `Reward`.

    A completion's reward is the sum of what its functions return, each times its weight; a function that returned None does
    not apply to it, and a completion to which none applies has no score, as one whose call failed: it is left out of its group. What each returned is kept in `Score.parts`, by its name, or its path where others have its name.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        config: RewardConfig,
        *,
        decode: Callable[[Sequence[int]], str],
        correct_at: float | None,
        log: Path | None = None,
    ) -> None:
        """Score with `rewards`; `is_correct` says what `correct_at` means. See `CallProcess`."""
        self._rewards = list(rewards)
        names = [reward.name for reward in rewards]  # functions of two files may have one
        self._names = {one.path: one.name if names.count(one.name) == 1 else one.path for one in rewards}
        self._config = config
        self._decode = decode
        self._correct_at = correct_at
        setup = Setup(
            paths=tuple(dict.fromkeys(reward.path for reward in rewards)),
            search=tuple(sys.path),
            concurrency=config.concurrency,
            timeout_s=config.timeout_s,
        )
        self._process = CallProcess(setup, log)
        self._starting: asyncio.Task[Answer] | None = None

    def start(self) -> asyncio.Task[Answer]:
        """Start the processes, which the first call would wait for; what this returns is done once they take calls.

        What keeps them from starting is said by every call that meets it.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._process.call(READY, {}), name="start of the rewards")
        return self._starting

    async def score(self, group: Group) -> Group:
        """See `Scorer.score`."""
        texts = await of_text(lambda: [self._decode(one.token_ids.tolist()) for one in group.trajectories])
        work = {reward.path: self._values(reward, group, texts) for reward in self._rewards}
        try:
            values = await together(work)
        except RewardFailed as error:
            raise _as_asked(error, self._config) from error
        columns = enumerate(zip(*values, strict=True))
        return _settled(group, [self._sum(values, group, place) for place, values in columns], self._config)

    async def close(self) -> None:
        """End the processes."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._process.close()

    def _sum(
        self, values: Sequence[float | RewardFailed | None], group: Group, place: int
    ) -> Score | RewardFailed:
        """Return the weighted sum of `values`, what each reward gave for completion `place` of `group`.

        A failure where one of them failed, and where all returned None: the sum of nothing is not a score of 0.
        """
        terms: list[tuple[Reward, float]] = []
        for reward, value in zip(self._rewards, values, strict=True):
            if isinstance(value, RewardFailed):
                return value
            if value is not None:
                terms.append((reward, value))
        if not terms:
            paths = ", ".join(self._names)
            return RewardFailed(
                NONE_APPLIES,
                f"no reward applies to completion {place} of {group.prompt.uid}: {paths} returned None; "
                "return a number for each completion that is to be trained",
            )
        total = math.fsum(reward.weight * value for reward, value in terms)
        parts = {self._names[reward.path]: value for reward, value in terms} if len(self._rewards) > 1 else {}
        return Score(reward=total, correct=is_correct(total, self._correct_at), parts=parts)

    async def _values(
        self, reward: Reward, group: Group, texts: Sequence[str]
    ) -> list[float | RewardFailed | None]:
        """Return what `reward` gives for each completion of `group`.

        Raises:
            RewardFailed: one call was for all of them, and failed or gave another number of values.
        """
        calls = reward.calls(group, texts)
        answers = await together(
            {f"{reward.path} {place}": self._answer(reward, group, call) for place, call in enumerate(calls)}
        )
        if reward.batched and isinstance(answers[0], RewardFailed):
            raise answers[0]
        values = answers if not reward.batched else _each(answers[0])
        if len(values) != len(texts):
            raise RewardFailed(
                NO_NUMBER,
                f"{_where(reward, group)} returned {len(values)} values for {len(texts)} completions",
            )
        return [_number(value, reward, group) for value in values]

    async def _answer(self, reward: Reward, group: Group, arguments: dict[str, Any]) -> object | RewardFailed:
        """Return what one call gives, tried as often as allowed, or its failure."""
        attempt = 0
        while True:
            attempt += 1
            answer = await self._process.call(reward.path, arguments)
            if not answer.failure:
                return answer.value
            said = f"{_where(reward, group)} {answer.failure}: {answer.detail}"
            log.warning("%s (attempt %d of %d)", said, attempt, self._config.max_attempts)
            if attempt >= self._config.max_attempts:
                return RewardFailed(answer.failure, said)
            await _pause(attempt)


class TaskScorer:
    """Satisfies `Scorer` with the `score` of a task: a function that is quick and ours, called in a thread.

    What waits is scored in one go: to change threads costs more than to score. What raises is tried again, as often as a function.
    A thread cannot be ended: a call that hangs goes on beside the run, whose group is given up at once.
    """

    def __init__(self, score: Callable[[Prompt, Trajectory], Score], config: RewardConfig) -> None:
        """Score with `score`."""
        self._score = score
        self._config = config
        self._waiting: list[tuple[Group, asyncio.Future[_Found]]] = []
        self._scoring: asyncio.Task[None] | None = None

    async def score(self, group: Group) -> Group:
        """See `Scorer.score`."""
        attempt = 0
        while True:
            attempt += 1
            found = await self._once(group)
            error = next((one for one in found if isinstance(one, RewardFailed)), None)
            if error is None:
                return _settled(group, found, self._config)
            log.warning("%s (attempt %d of %d)", error, attempt, self._config.max_attempts)
            if error.reason == TIMED_OUT or attempt >= self._config.max_attempts:
                return _settled(group, found, self._config)
            await _pause(attempt)

    async def _once(self, group: Group) -> _Found:
        answer: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, answer))
        if self._scoring is None:
            self._scoring = asyncio.create_task(self._score_all(), name="rewards")
        return await answer

    async def close(self) -> None:
        """Give up what is under way."""
        if self._scoring is not None:
            self._scoring.cancel()
            await asyncio.gather(self._scoring, return_exceptions=True)

    async def _score_all(self) -> None:
        try:
            while self._waiting:
                taken, self._waiting = self._waiting, []
                batch = _Batch([group for group, _ in taken], self._score)
                await self._until_done_or_stuck(batch)
                for number, ((_, answer), found) in enumerate(zip(taken, batch.done, strict=False), 1):
                    _answer(answer, found)
                    if number % ANSWERED_TOGETHER == 0:
                        await asyncio.sleep(0)
                left = taken[len(batch.done) :]
                if left:  # the first of them hangs
                    group, answer = left[0]
                    late = f"it took longer than {self._config.timeout_s:g} s (reward.timeout_s)"
                    failed = RewardFailed(TIMED_OUT, f"the reward of {group.prompt.uid}: {late}")
                    _answer(answer, [failed] * len(group.trajectories))
                    self._waiting = left[1:] + self._waiting
        finally:
            self._scoring = None

    async def _until_done_or_stuck(self, batch: _Batch) -> None:
        work = asyncio.get_running_loop().run_in_executor(_DAEMONS, batch.run)
        num_done = -1
        while not work.done() and len(batch.done) > num_done:
            num_done = len(batch.done)
            await asyncio.wait([work], timeout=self._config.timeout_s)
        if not work.done():
            batch.given_up = True
            batch.done = list(batch.done)  # what is still to come is nobody's


class _Batch:
    """Groups that are scored one after the other; `done` grows as it goes, until it is given up."""

    def __init__(self, groups: Sequence[Group], score: Callable[[Prompt, Trajectory], Score]) -> None:
        self.done: list[_Found] = []
        self.given_up = False
        self._groups = groups
        self._score = score

    def run(self) -> None:
        done = self.done
        for group in self._groups:
            if self.given_up:
                return
            done.append([self._one(group.prompt, one) for one in group.trajectories])

    def _one(self, prompt: Prompt, trajectory: Trajectory) -> Score | RewardFailed:
        try:
            return _checked(self._score(prompt, trajectory))
        except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt of a reward are its own failure
            return RewardFailed(RAISED, f"the reward of {prompt.uid} raised {type(error).__name__}: {error}")


def _answer(answer: asyncio.Future[_Found], found: _Found) -> None:
    if not answer.done():  # somebody still waits
        answer.set_result(found)


def _checked(score: object) -> Score:
    """Return what a task's `score` gave.

    Raises:
        TypeError: it is no `Score` with a finite reward; a coroutine is not awaited.
    """
    if inspect.iscoroutine(score):
        score.close()
    if not isinstance(score, Score):
        raise TypeError(f"`score` must return a Score at once, got {type(score).__name__}")
    if not math.isfinite(score.reward):
        raise TypeError(f"the reward of a Score must be a finite number, got {score.reward}")
    return score


def _settled(group: Group, found: _Found, config: RewardConfig) -> Group:
    """Return `group` with the scores of `found`; what failed is `UNSCORED`.

    Raises:
        RewardFailed: no two are left to be compared, or not the one that there is.
        TrainerError: one failed, and `config` wants the run to stop then.
    """
    failed = [one for one in found if isinstance(one, RewardFailed)]
    if failed and (
        config.on_failure is OnFailure.STOP or len(found) - len(failed) < min(_LEAST_SCORED, len(found))
    ):
        raise _as_asked(failed[0], config) from failed[0]
    if failed:
        log.warning("%d of %d completions have no score; the first: %s", len(failed), len(found), failed[0])
    return replace(group, scores=tuple(UNSCORED if isinstance(one, RewardFailed) else one for one in found))


def _as_asked(error: RewardFailed, config: RewardConfig) -> TrainerError:
    """Return what a failed reward is for the run."""
    if config.on_failure is OnFailure.STOP:
        return TrainerError(f"{error}; reward.on_failure=drop would leave the completion out and go on")
    return error


async def _pause(attempt: int) -> None:
    """Wait before the next attempt: a judge that is busy is busy for a while."""
    await asyncio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))


def _where(reward: Reward, group: Group) -> str:
    return f"the reward {reward.path} for {group.prompt.uid}"


def _each(value: object) -> list[object]:
    """Return the entries of a list, or the one value that is none."""
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _number(value: object, reward: Reward, group: Group) -> float | RewardFailed | None:
    if isinstance(value, RewardFailed):
        return value
    if reward.style == "verl" and isinstance(value, dict):
        value = cast("dict[str, object]", value).get("score")
    entries = _each(value)
    value = entries[0] if len(entries) == 1 else value  # an array of one element
    if value is None:
        return None
    if isinstance(value, (bool, int, float)) and math.isfinite(value):
        return float(value)
    return RewardFailed(NO_NUMBER, f"{_where(reward, group)} returned {value!r}, not a finite number")


class _Daemons(Executor):
    """Runs each call in a daemon thread: one that hangs keeps nobody from ending, as those of a pool would."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - becomes the future's
                future.set_exception(error)

        threading.Thread(target=run, name="rewards", daemon=True).start()
        return future


_DAEMONS = _Daemons()
