"""What the driver itself costs: its real loop, gate, buffer and journal, with everything heavy taken away."""

from __future__ import annotations

import asyncio
import gc
import math
from typing import TYPE_CHECKING

from modes_paced import Lengths, PacedReplica, PacedTask, StepLog, TimedJournal

from offbeat_ckptsync import SyncReport
from offbeat_trainer import AlgorithmConfig, AsyncConfig, LoopConfig, SamplingConfig, SqliteJournal
from offbeat_trainer.generation import GroupGenerator
from offbeat_trainer.loops.fully_async import run_fully_async
from offbeat_trainer.loops.outcome import Outcome
from offbeat_trainer.loops.parts import Parts
from offbeat_trainer.run_store import RunStore

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_engine import TrainBatch
    from offbeat_trainer.metrics import Metric

GROUP_SIZE = 8
GROUPS_PER_STEP = 250
LENGTHS = Lengths(median=8, sigma=0.4, longest=16)
GROUP_SECONDS = 10.0  # about how long a group takes: 10,000 of them in flight are then 1,000 a second


class NoPolicy:
    """Trains nothing, at once. Satisfies `Policy` as far as a run without warm-up needs it."""

    async def update(self, batch: TrainBatch) -> list[Metric]:
        """Throw the batch away."""
        del batch
        await asyncio.sleep(0)
        return []

    async def supervise(self, batch: TrainBatch) -> list[Metric]:
        """Throw the batch away."""
        return await self.update(batch)

    async def save(self, step: int) -> None:
        """Write nothing."""

    async def load(self, step: int | None) -> int | None:
        """Have nothing."""

    async def export(self, path: str) -> None:
        """Write nothing."""


class NoWeights:
    """Tells the replica its version, at once. Satisfies `Publisher`."""

    def __init__(self, replica: PacedReplica) -> None:
        """Publish to `replica`."""
        self._replica = replica

    async def publish(self, version: int) -> SyncReport:
        """Change nothing but the version."""
        await asyncio.sleep(0)
        self._replica.flip(version)
        return SyncReport(
            version=version,
            transport="none",
            num_members=1,
            num_tensors=0,
            num_buckets=0,
            num_bytes=0,
            total_s=0.0,
            pause_s=0.0,
            gb_per_s=0.0,
            begin_s=0.0,
            transfer_s=0.0,
            verify_s=0.0,
            flip_s=0.0,
            commit_s=0.0,
            gather_s=0.0,
            pack_s=0.0,
            wire_s=0.0,
            load_s=0.0,
        )


async def measure(folder: Path, in_flight: int, steps: int) -> dict[str, object]:
    """Return what a completion costs the driver's CPU, and how soon a step is begun once it can be.

    Counted are `steps` steps after `in_flight` groups are under way and have been replaced once.
    """
    staleness = in_flight // GROUPS_PER_STEP - 1
    first = staleness + 1  # by then every group that was begun at the start has been trained
    replica = PacedReplica(LENGTHS, GROUP_SECONDS / LENGTHS.longest, in_flight * GROUP_SIZE)
    log = StepLog(lambda: replica.own_s)
    journal = TimedJournal(SqliteJournal(folder / "journal.sqlite"))
    # Some steps more than are counted: at the end of a run nothing new is begun.
    parts = _parts(folder, replica, log, journal, staleness=staleness, steps=first + steps + staleness)
    gc.collect()
    run = asyncio.create_task(run_fully_async(parts, Outcome()))
    while len(log.ended) < first + steps and not run.done():
        await asyncio.wait((run,), timeout=0.5)
    if run.done():
        run.result()
    else:
        run.cancel()
        await asyncio.wait((run,))
    journal.close()
    window = range(first, first + steps)
    cpu_s = log.cpu_s[window[-1]] - log.cpu_s[first - 1]
    wall_s = log.ended[window[-1]] - log.ended[first - 1]
    samples = steps * GROUPS_PER_STEP * GROUP_SIZE
    delays = sorted(map(_delay_s, [log] * steps, [journal] * steps, window))
    return {
        "driver_us_per_sample": round(1e6 * cpu_s / samples, 2),
        "ready_to_consumed_p99_ms": round(1e3 * delays[math.ceil(0.99 * steps) - 1], 3),
        "ready_to_consumed_p50_ms": round(1e3 * delays[len(delays) // 2], 3),
        "in_flight_groups": min(
            values["buffer/running_groups"] + values["buffer/ready_groups"]
            for values in log.values[first : first + steps]
        ),
        "group_size": GROUP_SIZE,
        "samples": samples,
        "driver_busy": round(cpu_s / wall_s, 3),
    }


def _parts(
    folder: Path, replica: PacedReplica, log: StepLog, journal: TimedJournal, *, staleness: int, steps: int
) -> Parts:
    return Parts(
        task=PacedTask(),
        policy=NoPolicy(),
        generator=GroupGenerator(replica.generate_many),
        publisher=NoWeights(replica),
        reporter=log,
        store=RunStore(folder / "state", keep=2),
        seed=1,
        loop=LoopConfig(
            steps=steps,
            prompts_per_step=GROUPS_PER_STEP,
            group_size=GROUP_SIZE,
            validate_every=0,
            validation_prompts=1,
            save_every=0,
            sample_every=0,
        ),
        algorithm=AlgorithmConfig(),
        sampling=SamplingConfig(max_tokens=LENGTHS.longest),
        asynchrony=AsyncConfig(max_staleness=staleness),
        journal=journal,
    )


def _delay_s(log: StepLog, journal: TimedJournal, step: int) -> float:
    """Return the time between the moment `step` could be begun, and was asked for, and its groups being there."""
    last_s = max(journal.finished_s[index] for index in journal.taken[step])
    return log.began["reward"][step] - max(last_s, log.began["generate"][step])
