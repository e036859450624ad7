"""Synchronous training: generate, score, train, publish; the weights that sample are the weights that learn.

prompts -> generator -> groups -> scores -> advantages -> batch -> policy -> publisher -> generator
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_trainer.loops.learning import learn
from offbeat_trainer.loops.outcome import close_step, open_run
from offbeat_trainer.loops.parts import collect, score, sync_metrics, version_of

if TYPE_CHECKING:
    from offbeat_trainer.loops.outcome import Outcome
    from offbeat_trainer.loops.parts import Parts


async def run_sync(parts: Parts, outcome: Outcome, start: int = 0) -> None:
    """Train from step `start` to the last, or to the first step boundary after a stop was requested.

    The policy must already hold the weights of step `start`. `outcome` is filled as the run goes, so that whoever
    ends the run has what was reached.
    """
    await open_run(parts, outcome, start)
    for step in range(start, parts.loop.steps):
        clock = parts.clock()
        with clock.phase("generate"):
            groups = await collect(parts, step)
        with clock.phase("reward"):
            groups = await score(parts, groups)
        groups, trained = await learn(parts, clock, groups)
        with clock.phase("sync"):
            report = await parts.publisher.publish(version_of(step + 1))
        if await close_step(parts, outcome, clock, step, groups, [*trained, *sync_metrics(report)]):
            return
