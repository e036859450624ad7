"""What the driver itself costs: its real loop, gate, buffer and journal, with everything heavy taken away."""

from __future__ import annotations

import asyncio
import gc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modes_paced import Lengths, PacedReplica, PacedTask, StepLog, TimedJournal

from offbeat_ckptsync import SyncReport
from offbeat_trainer import (
    AsyncConfig,
    Grpo,
    GrpoConfig,
    LoopConfig,
    RewardConfig,
    SamplingConfig,
    SqliteJournal,
)
from offbeat_trainer.loops.online import run_fully_async
from offbeat_trainer.loops.outcome import Outcome
from offbeat_trainer.loops.run_store import RunStore
from offbeat_trainer.loops.session import Session
from offbeat_trainer.rollouts.scorer import TaskScorer
from offbeat_trainer.rollouts.single import GroupGenerator, SingleTurn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from offbeat_engine import TrainBatch
    from offbeat_trainer.data.metrics import Metric

GROUP_SIZE = 8
GROUP_S = 10.0  # of short completions: with 10,000 groups in flight, 1,000 a second


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the driver is given to do: groups of `GROUP_SIZE` completions, each about `group_s` seconds on its way."""

    lengths: Lengths
    group_s: float
    groups_per_step: int
    in_flight: int  # groups, a multiple of `groups_per_step`
    steps: int  # that are counted
    pickles: bool = False  # completions come as from another process

    @property
    def staleness(self) -> int:
        """Versions that generation runs ahead with so many in flight."""
        return self.in_flight // self.groups_per_step - 1


def many(in_flight: int, steps: int, group_s: float) -> Load:
    """Return many short completions."""
    return Load(
        lengths=Lengths(median=8, sigma=0.4, longest=16),
        group_s=group_s,
        groups_per_step=250,
        in_flight=in_flight,
        steps=steps,
    )


def long(steps: int) -> Load:
    """Return few completions of 8,192 tokens each, with what it takes to read them in."""
    return Load(
        lengths=Lengths(median=8192, sigma=0.0, longest=8192),
        group_s=1.0,
        groups_per_step=4,
        in_flight=16,
        steps=steps,
        pickles=True,
    )


class NoPolicy:
    """Trains nothing, at once. Satisfies `Policy` as far as a run without warm-up needs it."""

    async def update(self, batch: TrainBatch, state: Mapping[str, float] | None = None) -> list[Metric]:
        """Throw the batch away."""
        del batch
        await asyncio.sleep(0)
        return []

    async def supervise(self, batch: TrainBatch) -> list[Metric]:
        """Throw the batch away."""
        return await self.update(batch)

    async def save(self, step: int, *, block: bool) -> None:
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

    async def publish(self, version: int, gathered: Callable[[], None] | None = None) -> SyncReport:
        """Change nothing but the version."""
        del gathered
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


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What was seen of the steps of a `Load` that count."""

    cpu_s: float  # of the driver alone
    wall_s: float
    delays_s: list[float]  # ascending: from the moment a step could begin to the one it did
    in_flight: int  # the fewest groups


async def measure(folder: Path, in_flight: int, steps: int, group_s: float = GROUP_S) -> dict[str, object]:
    """Return what a completion costs the driver's CPU, and how soon a step is begun once it can be."""
    load = many(in_flight, steps, group_s)
    counted = await _run(folder, load)
    samples = load.steps * load.groups_per_step * GROUP_SIZE
    return {
        "driver_us_per_sample": round(1e6 * counted.cpu_s / samples, 2),
        "ready_to_consumed_p99_ms": round(1e3 * counted.delays_s[math.ceil(0.99 * steps) - 1], 3),
        "ready_to_consumed_p50_ms": round(1e3 * counted.delays_s[steps // 2], 3),
        "in_flight_groups": counted.in_flight,
        "group_size": GROUP_SIZE,
        "samples": samples,
        "driver_busy": round(counted.cpu_s / counted.wall_s, 3),
    }


async def measure_tokens(folder: Path, steps: int) -> dict[str, object]:
    """Return what a token of a long completion costs the driver's CPU."""
    load = long(steps)
    counted = await _run(folder, load)
    tokens = load.steps * load.groups_per_step * GROUP_SIZE * load.lengths.longest
    return {
        "driver_us_per_token": round(1e6 * counted.cpu_s / tokens, 4),
        "tokens_per_completion": load.lengths.longest,
        "tokens": tokens,
    }


async def _run(folder: Path, load: Load) -> Counted:
    """Run the loop; counted are `load.steps` steps after all in flight at first have been replaced once."""
    first = load.staleness + 1  # by then every group that was begun at the start has been trained
    token_s = load.group_s / load.lengths.longest
    replica = PacedReplica(load.lengths, token_s, load.in_flight * GROUP_SIZE, pickles=load.pickles)
    log = StepLog(lambda: replica.own_s)
    journal = TimedJournal(SqliteJournal(folder / "journal.sqlite"))
    parts = _parts(folder, replica, log, journal, load)
    gc.collect()
    run = asyncio.create_task(run_fully_async(parts, Outcome()))
    while len(log.ended) < first + load.steps and not run.done():
        await asyncio.wait((run,), timeout=0.5)
    if run.done():
        run.result()
    else:
        run.cancel()
        await asyncio.wait((run,))
    journal.close()
    window = range(first, first + load.steps)
    return Counted(
        cpu_s=log.cpu_s[window[-1]] - log.cpu_s[first - 1],
        wall_s=log.ended[window[-1]] - log.ended[first - 1],
        delays_s=sorted(_delay_s(log, journal, step) for step in window),
        in_flight=int(
            min(
                values["buffer/running_groups"] + values["buffer/ready_groups"]
                for values in log.values[first : first + load.steps]
            )
        ),
    )


def _parts(folder: Path, replica: PacedReplica, log: StepLog, journal: TimedJournal, load: Load) -> Session:
    return Session(
        task=PacedTask(),
        policy=NoPolicy(),
        rollout=SingleTurn(
            GroupGenerator(replica.generate_many), TaskScorer(PacedTask().score, RewardConfig())
        ),
        publisher=NoWeights(replica),
        reporter=log,
        store=RunStore(folder / "state", keep=2),
        seed=1,
        loop=LoopConfig(
            # Some more than are counted: at the end of a run nothing new is begun.
            steps=load.steps + 2 * load.staleness + 1,
            prompts_per_step=load.groups_per_step,
            group_size=GROUP_SIZE,
            validate_every=0,
            validation_prompts=1,
            save_every=0,
            sample_every=0,
        ),
        algorithm=Grpo(config=GrpoConfig()),
        sampling=SamplingConfig(max_tokens=load.lengths.longest),
        asynchrony=AsyncConfig(max_staleness=load.staleness),
        journal=journal,
    )


def _delay_s(log: StepLog, journal: TimedJournal, step: int) -> float:
    """Return the time between the moment `step` could be begun, and was asked for, and its groups being there."""
    last_s = max(journal.finished_s[index] for index in journal.taken[step])
    return log.began["reward"][step] - max(last_s, log.began["generate"][step])
