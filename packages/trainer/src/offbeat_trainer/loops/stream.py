"""Generation that runs beside training: groups come out as steps want them, weights go in as the mode says."""

from __future__ import annotations

import asyncio
import gc
import math
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from offbeat_rollout import Finish
from offbeat_trainer.config import Partial
from offbeat_trainer.data.metrics import Last, Mean, Metric, Sum
from offbeat_trainer.data.types import Group, oldest_version, version_of
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.loops.buffer import GroupBuffer, StalenessGate
from offbeat_trainer.loops.events import Flipped, PartialGroup, Restarted, recover
from offbeat_trainer.loops.producer import LEFT_OUT, Producer
from offbeat_trainer.rollouts.single import SingleTurn, sampling_params
from offbeat_trainer.watch.watchdog import GENERATION, TAIL_SHARE, now_s

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator

    from offbeat_ckptsync import SyncReport
    from offbeat_rollout import SamplingParams
    from offbeat_trainer.config import AsyncConfig, LoopConfig
    from offbeat_trainer.data.interface import Rollout
    from offbeat_trainer.data.types import Prompt, Spans, Trajectory
    from offbeat_trainer.loops.buffer import Entry
    from offbeat_trainer.loops.events import Recovered
    from offbeat_trainer.loops.schedule import Schedule
    from offbeat_trainer.loops.session import Session
    from offbeat_trainer.watch.watchdog import PhaseClock


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
        plain = _plain(session.rollout)
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
        rollout, size = self._session.rollout, self._session.loop.group_size
        plain = _plain(rollout)
        if plain is not None:
            return await plain.generator.complete(prompt, params, size, begun=begun)
        assert len(self._schedule.versions(index)) == 1  # `Schedule.obstacle` sees to it
        return await rollout.run(prompt, params, size)


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


RARER = 100


@asynccontextmanager
async def open_stream(session: Session, mode: AsyncConfig, start: int) -> AsyncGenerator[GroupStream]:
    """Go on with the data where the journal says step `start` stands; generation runs while the block lasts.

    Replicas must serve `version_of(start)`.

    Raises:
        PlanRefused: `mode` cannot be run.
        ResumeError: the journal does not fit the task.
    """
    stream = GroupStream(session, mode, start)
    stream.start()
    try:
        with rare_full_collections():
            yield stream
    finally:
        await stream.stop()


def _counted_as(reason: str) -> str:
    """Return the name of the metric that counts groups given up for `reason`."""
    kind = "" if reason.startswith(LEFT_OUT) else "dropped "
    return f"buffer/{kind}{reason}_groups".replace(" ", "_")


class GroupStream:
    """What a loop sees of generation."""

    def __init__(self, session: Session, mode: AsyncConfig, start: int) -> None:
        """See `open_stream`."""
        self._session = session
        self._mode = mode
        gate = StalenessGate.from_config(
            mode, groups_per_step=session.loop.prompts_per_step, num_steps=session.loop.steps
        )
        recovered = recover(session.journal.events(start), start, session.loop.prompts_per_step)
        if recovered.anew:
            session.journal.write(Restarted(step=start))
        self.buffer = GroupBuffer(
            gate,
            mode.order,
            session.journal,
            recovered=recovered,
            replay=session.replay,
            on_drop=self._dropped,
        )
        self._schedule = session.replay
        # Where nothing is generated before the new weights are served, or a schedule says when they are, a step waits for that.
        self._runs_on = mode.max_staleness > 0 and session.replay is None
        self._publishing: asyncio.Task[None] | None = None
        self._beside: list[asyncio.Task[list[Metric]]] = []  # `metrics` has not told of yet
        session.beside = self.beside if self._runs_on and mode.partial is not Partial.WAIT else None
        self._copied = asyncio.Event()  # the weights that it brings may change
        self._copied.set()
        self._newest = 0  # the version that the newest sync brings
        self._unscored = 0  # completions of groups taken since `metrics` told of them
        self._reports: list[SyncReport] = []  # of syncs that ended since `metrics` told of them
        if session.replay is None:
            self._producer = Producer(session, self.buffer, recovered, mode.max_attempts)
        else:
            whole = _plain(session.rollout) is None
            session.replay.check(session.loop.steps, kept=mode.partial.goes_on, whole=whole)
            self._producer = Replayer(session, self.buffer, recovered, session.replay)
        self._restore(recovered)

    def start(self) -> None:
        """Begin to generate."""
        self._producer.start()

    async def stop(self) -> None:
        """End generation, and a sync that is under way; what was begun is begun again by a run that goes on."""
        self._session.beside = None
        for task in (self._publishing, *self._beside):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._producer.stop()

    def beside(self, work: Coroutine[Any, Any, list[Metric]]) -> None:
        """Do `work` beside the next steps, by the weights served now: none change before it ends. `metrics` has what it returns."""
        version = self.buffer.served

        async def do() -> list[Metric]:
            with self._session.timeline.span("validation", f"version {version}"):
                return [*await work, Metric("validation/version", Last(version))]

        self._beside.append(asyncio.create_task(do(), name=f"beside steps, by version {version}"))

    async def take(self, step: int) -> list[Group]:
        """Return the scored groups of `step`, in the order of their prompts, as soon as there are enough.

        Raises:
            DeadlineExceeded: no group was finished for too long.
            Exception: what ended generation, a reward function's error included.
        """
        started_s = now_s()
        with self._session.watchdog.waiting("the trainer", GENERATION, f"give the groups of step {step}"):
            entries = await self.buffer.take(step)
        self._session.timeline.tail(_tail_s(entries, started_s))
        self._session.timeline.count("ready groups", self.buffer.ready_groups)
        groups = [entry.group for entry in entries if entry.group is not None]
        self._check(step, entries)
        scored = [group.scored for group in groups]
        self._unscored += sum(len(group.trajectories) for group in groups)
        self._unscored -= sum(len(group.trajectories) for group in scored)
        return scored

    def syncs_after(self, step: int) -> bool:
        """Say whether the weights that `step` makes go to the replicas.

        Every `sync_every` steps, and before anything that looks at them: validation, a checkpoint, the end.
        """
        loop, done = self._session.loop, step + 1
        if self._schedule is not None:
            return done in self._schedule.flips
        return (
            due(done, self._mode.sync_every)
            or due(done, loop.validate_every)
            or due(done, loop.save_every)
            or done == loop.steps
        )

    def settles_after(self, step: int) -> bool:
        """Say whether training waits after `step` until every replica serves its weights, and not only until they are copied out.

        So it does before a validation, a checkpoint, the end, or a stop that was requested; without staleness it always does.
        """
        loop, done = self._session.loop, step + 1
        looked_at = due(done, loop.validate_every) or due(done, loop.save_every) or done == loop.steps
        return self.syncs_after(step) and (not self._runs_on or looked_at or self._session.stop.requested)

    async def publish(self, version: int, *, settled: bool = True) -> None:
        """Bring `version` to every replica; what is under way meanwhile is treated as `partial` says.

        Without `settled` return once it has begun: it ends beside the next step, before which `copied` waits until the weights
        may change. One sync at a time: the one before, and what is made `beside`, have ended, or failed, first. Where that is still
        under way and the bound on staleness leaves room, this version is left out, and training goes on to the next.

        Raises:
            Exception: what this sync failed of, where it is waited for, or the one before.
        """
        under_way = [task for task in (self._publishing, *self._beside) if task is not None]
        room = version - self._newest < self._mode.max_staleness and self._mode.partial is not Partial.WAIT
        if room and not settled and not all(task.done() for task in under_way):
            return
        if self._publishing is not None:
            await self._publishing
        if self._beside:
            with self._session.watchdog.waiting("weight sync", GENERATION, "end the validation before it"):
                for task in self._beside:
                    await task
        if version <= self.buffer.served:
            return  # it was brought with what was tried again
        session = self._session
        if self._mode.partial is Partial.WAIT or session.replay is not None:
            with (
                session.timeline.phase("drain"),
                session.watchdog.waiting("weight sync", GENERATION, "end under the old weights"),
            ):
                await self._producer.drained(self.buffer.served)
        elif self._mode.partial is Partial.ABORT:
            await session.rollout.interrupt()
        self._newest = version
        self._copied = copied = asyncio.Event()
        self._publishing = asyncio.create_task(
            self._bring(version, None if settled else copied.set), name=f"publish version {version}"
        )
        self._publishing.add_done_callback(lambda _: copied.set())
        if settled:
            await self._publishing

    async def copied(self, clock: PhaseClock) -> None:
        """Return once the weights may change: what a sync under way brings is copied out. `clock` counts that as "sync"."""
        if not self._copied.is_set():
            with clock.phase("sync"):
                await self._copied.wait()

    async def _bring(self, version: int, copied: Callable[[], None] | None) -> None:
        session = self._session
        try:
            with session.timeline.span("sync", "under way"):
                report = await session.publisher.publish(version, copied)
        except Exception as error:
            self.buffer.fail(error)  # the trainer may wait for groups that need the new weights
            raise
        finally:
            session.rollout.go_on()
        session.journal.write(Flipped(steps=report.version - 1, version=report.version))
        session.timeline.mark("sync", f"version {report.version}")
        for name, why in report.fenced.items():
            session.reporter.phase("fenced", f"{name}: {why}; version {report.version} goes on without it")
        self._reports.append(report)
        self.buffer.serve(report.version)

    async def metrics(self, step: int) -> list[Metric]:
        """Return what syncs that ended since the last call took, the state of the queue, and what was dropped so far, by reason.

        A validation `beside` is told of once it has ended; before a step with one that is waited for it is waited for, too.
        """
        buffer = self.buffer
        if self._beside and validates_at_once(self._session.loop, step + 2):
            with self._session.watchdog.waiting(
                "the trainer", GENERATION, "end the validation beside its steps"
            ):
                await asyncio.wait(self._beside)
        reports, self._reports = self._reports, []
        unscored, self._unscored = self._unscored, 0
        beside = self._beside.pop(0).result() if self._beside and self._beside[0].done() else []
        return [
            *beside,
            *(metric for report in reports for metric in sync_metrics(report)),
            Metric("buffer/ready_groups", Last(buffer.ready_groups)),
            Metric("buffer/running_groups", Last(buffer.running)),
            Metric("buffer/issued_groups", Last(buffer.issued)),
            Metric("buffer/consumed_groups", Last(buffer.consumed)),
            *(Metric(_counted_as(reason), Last(count)) for reason, count in buffer.dropped.items()),
            Metric("buffer/unscored_completions", Sum(unscored)),
            Metric("generation/lost_replicas", Last(len(self._session.timeline.lost))),
            *self._session.timeline.metrics(),
        ]

    def _restore(self, recovered: Recovered) -> None:
        for index in sorted(recovered.finished):
            found = recovered.finished[index]
            group = Group(
                prompt=self._producer.prompt(index),
                trajectories=found.trajectories,
                scores=found.scores,
                baseline=found.baseline,
            )
            self.buffer.restore(index, found.version, group)

    def _dropped(self, index: int) -> None:
        self._producer.cancel(index)

    def _check(self, step: int, entries: list[Entry]) -> None:
        """Hold the bound over every token that is about to be trained."""
        oldest = min((entry.oldest for entry in entries if entry.oldest is not None), default=None)
        if oldest is not None and version_of(step) - oldest > self._mode.max_staleness:
            raise TrainerError(
                f"step {step} was given a token of version {oldest}, {version_of(step) - oldest} versions old; "
                f"max_staleness is {self._mode.max_staleness}. Nothing was trained on it; this is a defect"
            )


def sync_metrics(report: SyncReport) -> list[Metric]:
    """Return a weight sync in metrics."""
    gap = [] if report.worst_gap_s is None else [Metric("sync/worst_gap_s", Mean(report.worst_gap_s))]
    return [
        *gap,
        Metric("sync/failures", Sum(len(report.failures))),
        Metric("sync/version", Last(report.version)),
        Metric("sync/gb_per_s", Mean(report.gb_per_s)),
        Metric("sync/bytes", Sum(report.num_bytes)),
        Metric("sync/pause_s", Mean(report.pause_s)),
        Metric("sync/transfer_s", Mean(report.transfer_s)),
        Metric("sync/verify_s", Mean(report.verify_s)),
        Metric("sync/flip_s", Mean(report.flip_s)),
        Metric("sync/fenced_members", Sum(len(report.fenced))),
    ]


def validates_at_once(loop: LoopConfig, done: int) -> bool:
    """Say whether the loop waits for the validation after `done` steps, even where it runs on: so few are left."""
    return done == loop.steps or (done + 1 == loop.steps and due(done, loop.validate_every))


def due(step: int, every: int) -> bool:
    """Say whether something that happens `every` so many steps happens at `step`; 0 = never."""
    return every > 0 and step % every == 0


def _tail_s(entries: list[Entry], started_s: float) -> float:
    """Return how long a step that began to wait at `started_s` waited for its slowest groups alone."""
    finished_s = sorted(entry.finished_s for entry in entries)
    num_slowest = max(1, math.ceil(TAIL_SHARE * len(finished_s)))
    others_s = finished_s[: len(finished_s) - num_slowest]
    return max(0.0, finished_s[-1] - max([started_s, *others_s[-1:]]))


@contextmanager
def rare_full_collections() -> Generator[None]:
    """Make full collections a hundred times rarer in the block, and look at young objects once.

    A full collection stops the event loop while it walks every object there is. With ten thousand groups pending that
    was half a second, every few seconds, and a third of the driver's time; it found nothing, for groups make no cycles.
    The middle generation is looked at as rarely: most objects are groups', which stay for seconds, and to look at each
    once more soon after its first time made every second collection of young ones twice as long.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[2] * before[1] * RARER, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)
