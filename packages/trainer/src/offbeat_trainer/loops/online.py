"""Training on what the policy samples: generate, score, train, publish. One loop; its modes are settings of the stream.

sync            generate 0 | train 0 | generate 1 | train 1 |    the weights that sample are the weights that learn

one step off    generate 0 1 | generate 2 | generate 3 |         the groups of step k + 1 are made while step k trains;
| train 0    | train 1    |         every token but those of step 0 is one version old

fully async     generation streams; a step trains as soon as enough whole groups are there. How far the two may drift
apart is the gate's affair (`offbeat_trainer.loops.buffer`): no trained token is more than
`max_staleness` versions old. With 0 this is sync, batch for batch.

`GroupStream` is what the loop sees of generation: groups come out as steps want them, weights go in as the mode says.
"""

from __future__ import annotations

import asyncio
import gc
import math
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offbeat_trainer.config import Order, Partial
from offbeat_trainer.data.assemble import assembled
from offbeat_trainer.data.metrics import Last, Metric, Sum
from offbeat_trainer.data.types import Group, due, version_of
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.loops.buffer import GroupBuffer, StalenessGate
from offbeat_trainer.loops.events import Flipped, Restarted, recover
from offbeat_trainer.loops.outcome import (
    close_step,
    keep_trajectories,
    open_run,
    sync_metrics,
    validates_at_once,
)
from offbeat_trainer.loops.producer import LEFT_OUT, producer_of
from offbeat_trainer.watch.watchdog import GENERATION, TAIL_SHARE, now_s

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator

    from offbeat_ckptsync import SyncReport
    from offbeat_trainer.config import AsyncConfig
    from offbeat_trainer.loops.buffer import Entry
    from offbeat_trainer.loops.events import Recovered
    from offbeat_trainer.loops.outcome import Outcome
    from offbeat_trainer.loops.session import Session
    from offbeat_trainer.watch.watchdog import PhaseClock


def in_turns(mode: AsyncConfig, max_staleness: int = 0) -> AsyncConfig:
    """Return what taking turns makes of `mode`: attempts, stalls and spare groups are left to the settings, the rest is its nature.

    Nothing is under way when weights change, so which weights made which token depends on the step and never on timing. Spare
    groups (`over_sampling`) take the place of those that are dropped, in the order of the prompts.
    """
    return replace(
        mode,
        max_staleness=max_staleness,
        sync_every=1,
        partial=Partial.WAIT,
        order=Order.FIRST_IN,
    )


async def run_sync(session: Session, outcome: Outcome, start: int = 0) -> None:
    """See `run_online`. What is generated while a step is validated and saved is the next one's."""
    await run_online(session, outcome, start, in_turns(session.asynchrony))


async def run_one_step_off(session: Session, outcome: Outcome, start: int = 0) -> None:
    """See `run_online`."""
    await run_online(session, outcome, start, in_turns(session.asynchrony, max_staleness=1))


async def run_fully_async(session: Session, outcome: Outcome, start: int = 0) -> None:
    """See `run_online`."""
    await run_online(session, outcome, start, session.asynchrony)


async def run_online(session: Session, outcome: Outcome, start: int, mode: AsyncConfig) -> None:
    """Train from step `start` to the last, or to the first sync that is waited for after a stop was requested.

    The policy must already hold the weights of step `start`. `outcome` is filled as the run goes, so that whoever
    ends the run has what was reached.
    """
    await open_run(session, outcome, start)
    async with open_stream(session, mode, start) as stream:
        for step in range(start, session.loop.steps):
            clock = session.clock()
            with clock.phase("generate"):
                groups = await stream.take(step)
            with clock.phase("reward"):
                batch = await assembled(groups, session.algorithm.targets, session.sampling.temperature)
            await stream.copied(clock)
            with clock.phase("train"):  # meanwhile the groups of the next steps are generated
                trained = await session.policy.update(batch, session.algorithm.state)
            session.stop.held = not stream.settles_after(step)
            if stream.syncs_after(step):
                with clock.phase("sync"):
                    await stream.publish(version_of(step + 1), settled=not session.stop.held)
            keep_trajectories(session, step, groups, batch)
            if await close_step(
                session, outcome, clock, step, groups, [*trained, *await stream.metrics(step)]
            ):
                return
            # To free thousands of completions takes milliseconds: now, not once the next step's are there.
            del groups, batch


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
            on_drop=lambda index: self._producer.cancel(index),
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
        self._producer = producer_of(session, self.buffer, recovered, mode)
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

    def _check(self, step: int, entries: list[Entry]) -> None:
        """Hold the bound over every token that is about to be trained."""
        oldest = min((entry.oldest for entry in entries if entry.oldest is not None), default=None)
        if oldest is not None and version_of(step) - oldest > self._mode.max_staleness:
            raise TrainerError(
                f"step {step} was given a token of version {oldest}, {version_of(step) - oldest} versions old; "
                f"max_staleness is {self._mode.max_staleness}. Nothing was trained on it; this is a defect"
            )


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
