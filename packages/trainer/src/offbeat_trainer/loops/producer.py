"""The generating side of a stream: as the gate opens, or as a schedule says, prompts become groups; these are scored, and accounted for."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from offbeat_rollout import Finish, NoReplica, RequestError, RolloutError
from offbeat_trainer.data.types import Group, oldest_version
from offbeat_trainer.errors import DeadlineExceeded, GroupFailed, ResumeError, TrainerError, WorkerGone
from offbeat_trainer.loops.events import PartialGroup
from offbeat_trainer.rollouts.single import SingleTurn, sampling_params
from offbeat_trainer.watch.watchdog import GENERATION, now_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from offbeat_rollout import SamplingParams
    from offbeat_trainer.config import AsyncConfig
    from offbeat_trainer.data.interface import Rollout
    from offbeat_trainer.data.types import Prompt, Spans, Trajectory
    from offbeat_trainer.loops.buffer import GroupBuffer
    from offbeat_trainer.loops.events import Recovered
    from offbeat_trainer.loops.schedule import Schedule
    from offbeat_trainer.loops.session import Session

log = logging.getLogger(__name__)

T = TypeVar("T")
FAILED = "failed"
LEFT_OUT = "left out "
"""Begins the reasons of groups that were dropped because `Algorithm.keeps` said so."""
REFILLS = 10
"""How many times the prompts of a step may be left out in a row before a run ends: it would go through its data for nothing."""
REFUSED = "refused"
UNSCORED_GROUP = "unscored"

# What a group may fail with without its being the run's fault: it is tried again, elsewhere if there is an elsewhere.
RETRIED = (RolloutError, WorkerGone, DeadlineExceeded, ConnectionError, TimeoutError)
TOGETHER = 64  # groups that are begun before anybody else has a turn
OUTAGE_S = 300.0
"""How long groups may fail in a row before a run ends in which some came through before: a judge may be down."""
PROBE_S = 5.0  # between two groups that are begun meanwhile, so that an outage uses few prompts up
REST_S = 1.0  # before the next attempt: replicas are fenced, replaced and synced meanwhile


async def tried_again(work: Callable[[], Awaitable[T]], max_attempts: int) -> T:
    """Return what `work` gives, which is begun anew where it fails of what may pass, `max_attempts` times in all."""
    for _ in range(max_attempts - 1):
        try:
            return await work()
        except RETRIED as error:
            log.warning("tried again: %s: %s", type(error).__name__, error)
            await asyncio.sleep(REST_S)
    return await work()


class Prompts:
    """The data in order, by index: unfinished ones of an earlier process first, then on."""

    def __init__(self, session: Session, recovered: Recovered) -> None:
        """Go on where `recovered` stands."""
        self._session = session
        self._gaps = list(reversed(recovered.gaps))
        self._next = recovered.next_index
        self._uids = recovered.uids
        self._steps: dict[int, list[Prompt]] = {}

    def next_index(self) -> int:
        """Return the next index and move on."""
        if self._gaps:
            return self._gaps.pop()
        self._next += 1
        return self._next - 1

    def step_of(self, index: int) -> int:
        """Return the step whose prompts `index` is among; it decides the sampling seeds, whenever it is trained."""
        return index // self._session.loop.prompts_per_step

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of `index`.

        Raises:
            ResumeError: the journal knows it under another uid.
        """
        step, size = self.step_of(index), self._session.loop.prompts_per_step
        if step not in self._steps:
            while len(self._steps) > 1:  # indices rise, gaps aside: two steps are enough
                self._steps.pop(next(iter(self._steps)))
            self._steps[step] = self._session.task.prompts(step, size)
        prompt = self._steps[step][index % size]
        known = self._uids.get(index, prompt.uid)
        if known != prompt.uid:
            raise ResumeError(
                f"prompt {index} is {prompt.uid!r}, but the journal has it as {known!r}: the task, its files or "
                "`prompts_per_step` are not those the run began with; set them back, or start a new run"
            )
        return prompt


class Producer:
    """Begins groups as the gate allows and puts them, scored, into the buffer. Errors end up in `GroupBuffer.fail`."""

    def __init__(
        self, session: Session, buffer: GroupBuffer, recovered: Recovered, max_attempts: int
    ) -> None:
        """Fill `buffer`; nothing runs before `start`."""
        self._session = session
        self._buffer = buffer
        self._prompts = Prompts(session, recovered)
        self._partial_groups = recovered.partial_groups
        self._max_attempts = max_attempts
        self._failures = 0  # in a row
        self._failing_since_s = 0.0
        self._works = False  # a group came through
        self._left_out = 0  # in a row
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups: dict[int, asyncio.Task[None]] = {}

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of `index`."""
        return self._prompts.prompt(index)

    def start(self) -> None:
        """Begin to feed."""
        self._spawn("feed", self._feed())

    async def stop(self) -> None:
        """Cancel everything and wait until it is gone."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cancel(self, index: int) -> None:
        """Stop generating a group that was dropped."""
        task = self._groups.pop(index, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def drained(self, version: int) -> None:
        """Wait until everything is made that `version`, the one served, is to make."""
        del version  # what is begun now is begun under it
        await self._buffer.settled()

    async def _feed(self) -> None:
        for number in itertools.count(1):
            if self._failures >= self._most_failures:
                await asyncio.sleep(PROBE_S)
            await self._buffer.leave()
            index = self._prompts.next_index()
            prompt = self._prompts.prompt(index)
            begun, version = self._begun(index)
            self._buffer.issue(index, prompt.uid, version)
            self._groups[index] = self._spawn(f"group {index}", self._make(index, prompt, begun, version))
            # What begins in one turn of the loop travels in one message and joins one batch. A new version lets hundreds
            # in: the trainer must not wait for all of them.
            if number % TOGETHER == 0:
                await asyncio.sleep(0)

    def _begun(self, index: int) -> tuple[tuple[Trajectory, ...], int]:
        """Return what an earlier process left of a group, if it is not too old by now, and the oldest version in it.

        What the weights served now made of it, or lost ones that are still to be made again, is not gone on with: a schedule
        says of a completion which version made which tokens, rising, and not where one version began a second time.
        """
        served = self._buffer.served
        partial = self._partial_groups.pop(index, ())
        versions = {span.version for one in partial for span in one.spans}
        if versions and max(versions) < served and self._buffer.room_for(min(versions)):
            return partial, min(versions)
        return (), served

    async def _make(self, index: int, prompt: Prompt, begun: tuple[Trajectory, ...], version: int) -> None:
        try:
            group = await self._complete(index, prompt, begun, version)
            if group is not None:
                self._failures, self._works = 0, True
                self._finish(index, group)
                self._session.watchdog.progress(GENERATION, f"finished group {index}")
        finally:
            self._groups.pop(index, None)

    def _finish(self, index: int, group: Group) -> None:
        """Put a scored group into the buffer, unless the algorithm leaves it out."""
        scored = group.scored
        if not scored.trajectories:
            self._give_up(index, group.prompt, UNSCORED_GROUP, "none of its completions has a score")
            return
        why = self._session.algorithm.keeps(scored)
        if not why:
            self._left_out = 0
            self._buffer.finish(index, group)
            return
        self._left_out += 1
        log.debug("the group of prompt %r is left out: %s", group.prompt.uid, why)
        self._buffer.drop(index, LEFT_OUT + why)
        if self._left_out >= REFILLS * self._session.loop.prompts_per_step:
            raise TrainerError(
                f"the algorithm left {self._left_out} groups in a row out of training, the last as {why!r}: there is nothing to learn "
                "from these prompts. Take some that are right now and then, more completions of each (trainer.group_size), or let the "
                "algorithm keep such groups (algorithm.dynamic_sampling=false)"
            )

    async def _complete(
        self, index: int, prompt: Prompt, begun: tuple[Trajectory, ...], version: int
    ) -> Group | None:
        """Return the scored group, tried as often as allowed; None once it is dropped. It is never made up."""
        session = self._session
        params = sampling_params(session.sampling, session.task, session.seed, self._prompts.step_of(index))
        have = begun
        attempt = 1
        why = ""

        def keep(trajectories: tuple[Trajectory, ...]) -> None:
            nonlocal have
            have = trajectories
            session.journal.write(PartialGroup(index=index, trajectories=trajectories))

        while attempt <= self._max_attempts:
            try:
                group = await session.training_rollout.run(
                    prompt, params, session.loop.group_size, have, keep
                )
                why = _unfit(group, version)
                if not why:
                    return group
                have = ()
            except (RequestError, GroupFailed) as error:
                reason = error.counted_as if isinstance(error, GroupFailed) else REFUSED
                self._give_up(index, prompt, reason, str(error))
                return None
            except NoReplica as error:  # waits for one to join; the watchdog ends it if none does
                why, attempt = str(error), attempt - 1
                await asyncio.sleep(REST_S)
            except RETRIED as error:
                why = f"{type(error).__name__}: {error}"
                await asyncio.sleep(REST_S)
            attempt += 1
        self._give_up(index, prompt, FAILED, why)
        return None

    @property
    def _most_failures(self) -> int:
        """How many groups may fail in a row before it is taken for more than a few bad prompts."""
        return max(8, 2 * self._session.loop.prompts_per_step)

    def _give_up(self, index: int, prompt: Prompt, reason: str, why: str) -> None:
        """Drop a group; when nothing else happens any more, end the run: the data would run through for nothing."""
        log.warning("the group of prompt %r is dropped (%s): %s", prompt.uid, reason, why)
        self._buffer.drop(index, reason)
        self._failures += 1
        if self._failures == 1:
            self._failing_since_s = now_s()
        if self._failures < self._most_failures:
            return
        said = f"{self._failures} groups in a row could not be made; the last: {why}"
        if not self._works or now_s() - self._failing_since_s >= OUTAGE_S:
            raise TrainerError(said)
        if self._failures == self._most_failures:
            words = f"{said}. One is tried every {PROBE_S:g} s, and the run ends unless one comes through in {OUTAGE_S:g} s"
            log.warning("%s", words)
            self._session.reporter.phase("failing", words)

    def _spawn(self, name: str, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # for a task that is cancelled before its first step
        return task

    async def _guarded(self, work: Coroutine[object, object, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - it is raised where the loop takes its groups
            self._buffer.fail(error)


def _unfit(group: Group, version: int) -> str:
    """Say why `group` must not be trained as it is, or return nothing."""
    oldest = oldest_version(group.trajectories)
    if oldest is not None and oldest < version:
        return f"a replica made tokens with version {oldest} where {version} was served"
    return ""


class Replayer(Producer):
    """A producer whose every decision was made before.

    A completion that several versions made is made again in pieces: under each version it is generated to its end and
    cut where the next version took over. Seeds of continuations depend on the cut, so the pieces are the same.
    """

    def __init__(
        self, session: Session, buffer: GroupBuffer, recovered: Recovered, schedule: Schedule
    ) -> None:
        """Follow `schedule`, from the step that `buffer` is at."""
        super().__init__(session, buffer, recovered, max_attempts=1)
        self._schedule = schedule
        self._left: Counter[int] = Counter()  # pieces to be made, by version
        taken = {index for step, indices in buffer.script.items() if step >= buffer.step for index in indices}
        self._indices = sorted(taken - set(recovered.finished))
        for index in self._indices:
            self._left.update(self._versions(index))

    def start(self) -> None:
        """Begin all groups: each waits for its own versions."""
        for index in self._indices:
            self._spawn(f"replay {index}", self._replay(index))

    async def drained(self, version: int) -> None:
        """See `Producer.drained`."""
        await self._buffer.until(lambda: self._left[version] == 0)

    async def _replay(self, index: int) -> None:
        session, buffer, schedule = self._session, self._buffer, self._schedule
        prompt = self.prompt(index)
        params = sampling_params(session.sampling, session.task, session.seed, self._prompts.step_of(index))
        begun = self._partial_groups.get(index, ())
        made = Group(prompt=prompt, trajectories=())
        issued = False
        for version in self._versions(index):
            await buffer.until(lambda version=version: buffer.served >= version)
            if buffer.served > version:
                raise TrainerError(
                    f"group {index} needs version {version}, and {buffer.served} is served already"
                )
            if not issued:
                buffer.issue(index, prompt.uid, schedule.begun[index])
                issued = True
            made = await self._make_again(index, prompt, params, begun)
            begun = tuple(
                _cut(one, spans, version)
                for one, spans in zip(made.trajectories, schedule.spans[index], strict=True)
            )
            if any(one.finish is Finish.ABORT for one in begun):
                session.journal.write(PartialGroup(index=index, trajectories=begun))
            self._left[version] -= 1
            if not self._left[version]:
                buffer.touch()
        whole = Group(prompt=prompt, trajectories=begun)
        plain = _plain(session.training_rollout)
        buffer.finish(index, made if plain is None else await plain.score(whole))
        session.watchdog.progress(GENERATION, f"replayed group {index}")

    def _versions(self, index: int) -> list[int]:
        """Return the versions that are still to make tokens of a group, of which an earlier process may have left some."""
        versions, partial = self._schedule.versions(index), self._partial_groups.get(index, ())
        made = oldest_version(partial) and max(span.version for one in partial for span in one.spans)
        return [version for version in versions if not made or version > made]

    async def _make_again(
        self, index: int, prompt: Prompt, params: SamplingParams, begun: tuple[Trajectory, ...]
    ) -> Group:
        """Return the group as the version served now makes it from what others began."""
        rollout, size = self._session.training_rollout, self._session.loop.group_size
        plain = _plain(rollout)
        if plain is not None:
            return await plain.generator.complete(prompt, params, size, begun=begun)
        assert len(self._schedule.versions(index)) == 1  # `Schedule.obstacle` sees to it
        return await rollout.run(prompt, params, size)


def producer_of(session: Session, buffer: GroupBuffer, recovered: Recovered, mode: AsyncConfig) -> Producer:
    """Return what makes the groups of a run: as the gate allows, or as the schedule says that the run replays.

    Raises:
        TrainerError: that schedule cannot be followed.
    """
    if session.replay is None:
        return Producer(session, buffer, recovered, mode.max_attempts)
    whole = _plain(session.training_rollout) is None
    session.replay.check(session.loop.steps, kept=mode.partial.goes_on, whole=whole)
    return Replayer(session, buffer, recovered, session.replay)


def _plain(rollout: Rollout) -> SingleTurn | None:
    """Return `rollout` if what it makes is what is sampled, and can be gone on with; a subclass may draw and choose otherwise."""
    return rollout if isinstance(rollout, SingleTurn) and type(rollout) is SingleTurn else None


def _cut(whole: Trajectory, spans: Spans, version: int) -> Trajectory:
    """Return what of `whole` was made by `version` and those before it.

    Raises:
        TrainerError: there is not as much as the schedule says: this is not the same run.
    """
    count = sum(num_tokens for made_by, num_tokens in spans if made_by <= version)
    more_comes = any(made_by > version for made_by, _ in spans)
    have = whole.num_trained
    if have < count or (not more_comes and have != count):
        name = whole.turns[0].completion.request_id if whole.turns else "a trajectory without turns"
        raise TrainerError(
            f"{name}: the schedule has {count} tokens up to version {version}, now there are {have}; "
            "settings, task, model and seed must be those of the recorded run, and the engine must be deterministic"
        )
    return whole.cut(count, Finish.ABORT) if more_comes or count < have else whole
