"""Synchronous training: generate, score, train, publish; the weights that sample are the weights that learn.

prompts -> generator -> groups -> scores -> advantages -> batch -> policy -> publisher -> generator
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_trainer.assemble import assemble, with_advantages
from offbeat_trainer.loops.outcome import close_step, save
from offbeat_trainer.loops.parts import collect, score, sync_metrics, validate, version_of
from offbeat_trainer.phases import PhaseClock

if TYPE_CHECKING:
    from offbeat_trainer.loops.outcome import Outcome
    from offbeat_trainer.loops.parts import Parts


async def run_sync(parts: Parts, outcome: Outcome, start: int = 0) -> None:
    """Train from step `start` to the last, or to the first step boundary after a stop was requested.

    The policy must already hold the weights of step `start`. `outcome` is filled as the run goes, so that whoever
    ends the run has what was reached.
    """
    await _open(parts, outcome, start)
    for step in range(start, parts.loop.steps):
        clock = PhaseClock(parts.reporter)
        with clock.phase("generate"):
            groups = await collect(parts, step)
        with clock.phase("reward"):
            groups = with_advantages(await score(parts, groups), parts.algorithm.advantage)
            batch = assemble(groups, temperature=parts.sampling.temperature)
        with clock.phase("train"):
            trained = await parts.policy.update(batch)
        with clock.phase("sync"):
            report = await parts.publisher.publish(version_of(step + 1))
        await close_step(parts, outcome, clock, step, groups, [*trained, *sync_metrics(report)])
        if parts.stop.requested:
            outcome.interrupted = step + 1 < parts.loop.steps
            return


async def _open(parts: Parts, outcome: Outcome, start: int) -> None:
    clock = PhaseClock(parts.reporter)
    outcome.steps = start
    with clock.phase("sync", "first weights to every replica"):
        await parts.publisher.publish(version_of(start))
    if outcome.accuracy_before is None:
        outcome.accuracy_before = await validate(parts, clock, start, "before")
    if start == 0:
        await save(
            parts, outcome
        )  # the warm-up is not done twice, and a run can be resumed from its first step
    parts.stop.listening = True
