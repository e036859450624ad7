"""Fully asynchronous training: generation streams, a step trains as soon as enough whole groups are there.

How far the two may drift apart is the gate's affair (`offbeat_trainer.stream.gate`): no trained token is more than
`max_staleness` versions old. With 0 this is synchronous training, batch for batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_trainer.data.assemble import assembled
from offbeat_trainer.loops.outcome import close_step, open_run, sync_metrics
from offbeat_trainer.stream.gate import version_of
from offbeat_trainer.stream.stream import open_stream

if TYPE_CHECKING:
    from offbeat_trainer.loops.outcome import Outcome
    from offbeat_trainer.stream.parts import Parts


async def run_fully_async(parts: Parts, outcome: Outcome, start: int = 0) -> None:
    """Train from step `start` to the last, or to the first sync after a stop was requested.

    The policy must already hold the weights of step `start`. `outcome` is filled as the run goes.
    """
    await open_run(parts, outcome, start)
    async with open_stream(parts, parts.asynchrony, start) as stream:
        for step in range(start, parts.loop.steps):
            clock = parts.clock()
            with clock.phase("generate"):
                groups = await stream.take(step)
            with clock.phase("reward"):
                batch = await assembled(groups, parts.algorithm.targets, parts.sampling.temperature)
            with clock.phase("train"):
                trained = await parts.policy.update(batch)
            parts.stop.held = not stream.syncs_after(step)
            if not parts.stop.held:
                with clock.phase("sync"):
                    report = await stream.publish(version_of(step + 1))
                trained = [*trained, *sync_metrics(report)]
            if await close_step(parts, outcome, clock, step, groups, [*trained, *stream.metrics()]):
                return
            # To free thousands of completions takes milliseconds: now, not once the next step's are there.
            del groups, batch
