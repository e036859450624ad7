"""Training on what is written down: rows -> batch -> policy, and held-out rows looked at now and then. Nothing is generated."""

# tensordict is typed in part.
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat_trainer.loops.outcome import ACCURACY, save
from offbeat_trainer.metrics import Metric, reduce_metrics
from offbeat_trainer.stream.parts import StopRequest
from offbeat_trainer.stream.stream import due
from offbeat_trainer.watch.timeline import Timeline
from offbeat_trainer.watch.watchdog import PhaseClock, Watchdog

if TYPE_CHECKING:
    from offbeat_engine import TrainBatch
    from offbeat_trainer.config import LoopConfig
    from offbeat_trainer.interface import OfflinePolicy, Reporter
    from offbeat_trainer.loops.outcome import Outcome
    from offbeat_trainer.run_store import RunStore

Validate = Callable[[PhaseClock, int, str], Awaitable[list[Metric]]]
"""Measures the policy's completions at a step, as `loops.outcome.validate`; a title shows some of them."""
LOSS = "validation/loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineParts:
    """Everything that the loop works with.

    `batch` makes the batch of a step, in a thread of its own. `held_out` is looked at as `loop.validate_every` says, and at both
    ends, and `validate` is called then; None: there is nothing to measure.
    """

    policy: OfflinePolicy
    batch: Callable[[int], TrainBatch]
    held_out: TrainBatch | None
    reporter: Reporter
    store: RunStore
    loop: LoopConfig
    validate: Validate | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    timeline: Timeline = field(default_factory=Timeline)
    watchdog: Watchdog = field(default_factory=Watchdog)

    def clock(self) -> PhaseClock:
        """Return a clock for the phases of one step."""
        return PhaseClock(self.reporter, self.timeline, self.watchdog)


async def run_offline(parts: OfflineParts, outcome: Outcome, start: int = 0) -> None:
    """Train from step `start` to the last, or to the first step boundary after a stop was requested.

    The policy must already hold the weights of step `start`. `outcome` is filled as the run goes.
    """
    outcome.steps = start
    if start == 0:
        found = reduce_metrics(await _validate(parts, parts.clock(), 0, "before"))
        outcome.loss_before, outcome.accuracy_before = found.get(LOSS), found.get(ACCURACY)
    parts.stop.listening = True
    for step in range(start, parts.loop.steps):
        clock = parts.clock()
        batch = await asyncio.to_thread(parts.batch, step)
        with clock.phase("train"):
            trained = await parts.policy.update(batch)
        if await _close_step(parts, outcome, clock, step + 1, trained):
            return


async def _close_step(
    parts: OfflineParts, outcome: Outcome, clock: PhaseClock, done: int, trained: list[Metric]
) -> bool:
    """Validate, report and save what the calendar says is due; return whether the run ends here."""
    outcome.steps, outcome.steps_here = done, outcome.steps_here + 1
    last = done == parts.loop.steps
    metrics = list(trained)
    if last or due(done, parts.loop.validate_every):
        metrics += await _validate(parts, clock, done, "after" if last else "")
        found = reduce_metrics(metrics)
        outcome.loss_after, outcome.accuracy_after = found.get(LOSS), found.get(ACCURACY)
    parts.reporter.metrics(done, [*metrics, *clock.metrics()])
    ends = parts.stop.due
    if due(done, parts.loop.save_every) or ends or (last and parts.loop.save_every):
        with clock.phase("save"):
            await save(parts.store, parts.policy, outcome, block=ends or last)
    outcome.take_seconds(clock.seconds)
    outcome.interrupted = ends and not last
    return ends


async def _validate(parts: OfflineParts, clock: PhaseClock, step: int, title: str) -> list[Metric]:
    metrics: list[Metric] = []
    if parts.held_out is not None:
        with clock.phase("evaluate", f"{parts.held_out.batch_size[0]} held-out sequences"):
            metrics += await parts.policy.evaluate(parts.held_out)
    if parts.validate is not None:
        metrics += await parts.validate(clock, step, title)
    return metrics
