"""Training on what is written down: rows -> batch -> policy, and held-out rows looked at now and then. Nothing is generated.

Supervised training before reinforcement learning: a policy that is right sometimes has something to learn from.
"""

# tensordict is typed in part.
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from offbeat_trainer.data.assemble import assemble_examples
from offbeat_trainer.data.metrics import Metric, reduce_metrics
from offbeat_trainer.data.types import due
from offbeat_trainer.loops.outcome import ACCURACY, save
from offbeat_trainer.loops.session import StopRequest
from offbeat_trainer.watch.fanout import progress_of
from offbeat_trainer.watch.watchdog import PhaseClock, Timeline, Watchdog

if TYPE_CHECKING:
    from offbeat_engine import EngineConfig, TrainBatch
    from offbeat_trainer.config import LoopConfig, WarmupConfig
    from offbeat_trainer.data.interface import OfflinePolicy, Policy, Reporter, Supervised
    from offbeat_trainer.loops.outcome import Outcome
    from offbeat_trainer.loops.run_store import RunStore


Validate = Callable[[PhaseClock, int, str], Awaitable[list[Metric]]]
"""Measures the policy's completions at a step, as `loops.outcome.validate`; a title shows some of them."""
LOSS = "validation/loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSession:
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


async def run_offline(parts: OfflineSession, outcome: Outcome, start: int = 0) -> None:
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
    parts: OfflineSession, outcome: Outcome, clock: PhaseClock, done: int, trained: list[Metric]
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


async def _validate(parts: OfflineSession, clock: PhaseClock, step: int, title: str) -> list[Metric]:
    metrics: list[Metric] = []
    if parts.held_out is not None:
        with clock.phase("evaluate", f"{parts.held_out.batch_size[0]} held-out sequences"):
            metrics += await parts.policy.evaluate(parts.held_out)
    if parts.validate is not None:
        metrics += await parts.validate(clock, step, title)
    return metrics


TOLD_EVERY = 10


def warm_up_engine(engine: EngineConfig, config: WarmupConfig) -> EngineConfig:
    """Return `engine` with the schedule of the warm-up: a short rise, then half a cosine down to a tenth.

    `config.lr` is a number here: which one fits the model is known to whoever chose that.
    """
    from offbeat_engine import Schedule

    assert config.lr is not None
    optimizer = replace(
        engine.optimizer,
        lr=config.lr,
        schedule=Schedule.COSINE,
        warmup_steps=min(config.lr_warmup_steps, config.steps // 2),
        total_steps=config.steps,
        min_lr_ratio=0.1,
    )
    return replace(engine, optimizer=optimizer)


async def run_warm_up(policy: Policy, task: Supervised, config: WarmupConfig, reporter: Reporter) -> None:
    """Train `config.steps` supervised batches."""

    def batch_of(step: int) -> TrainBatch:
        return assemble_examples(task.examples(step, config.batch_size))

    batch, progress = batch_of(0), progress_of(reporter)
    for step in range(config.steps):
        following = min(step + 1, config.steps - 1)  # made while the ranks train on this one
        trained, batch = await asyncio.gather(policy.supervise(batch), asyncio.to_thread(batch_of, following))
        if (step + 1) % TOLD_EVERY == 0 or step + 1 == config.steps:
            loss = reduce_metrics(trained)["train/loss"]
            if progress is not None:
                progress(step + 1, config.steps)
            reporter.phase("warm-up", f"step {step + 1} of {config.steps}, loss {loss:.3f}")
