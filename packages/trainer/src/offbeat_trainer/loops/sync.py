"""Synchronous training: generate, score, train, publish; the weights that sample are the weights that learn.

prompts -> generator -> groups -> scores -> advantages -> batch -> policy -> publisher -> generator
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from offbeat_trainer.config import Order, Partial, TooOld
from offbeat_trainer.data.assemble import assembled
from offbeat_trainer.loops.outcome import close_step, open_run, sync_metrics
from offbeat_trainer.stream.gate import version_of
from offbeat_trainer.stream.stream import open_stream

if TYPE_CHECKING:
    from offbeat_trainer.config import AsyncConfig
    from offbeat_trainer.loops.outcome import Outcome
    from offbeat_trainer.stream.parts import Parts


def in_turns(mode: AsyncConfig) -> AsyncConfig:
    """Return what taking turns makes of `mode`: attempts and stalls are left to the settings, the rest is its nature."""
    return replace(
        mode,
        max_staleness=0,
        sync_every=1,
        partial=Partial.WAIT,
        recompute_kv=False,
        order=Order.FIRST_IN,
        too_old=TooOld.PACE,
        over_sampling=0.0,
    )


async def run_sync(
    parts: Parts, outcome: Outcome, start: int = 0, *, mode: AsyncConfig | None = None
) -> None:
    """Train from step `start` to the last, or to the first step boundary after a stop was requested.

    The policy must already hold the weights of step `start`. `outcome` is filled as the run goes, so that whoever
    ends the run has what was reached. What is generated while a step is validated and saved is the next one's.
    `mode` is another than `in_turns` makes, which syncs after each step, too.
    """
    mode = in_turns(parts.asynchrony) if mode is None else mode
    await open_run(parts, outcome, start)
    async with open_stream(parts, mode, start) as stream:
        for step in range(start, parts.loop.steps):
            clock = parts.clock()
            with clock.phase("generate"):
                groups = await stream.take(step)
            with clock.phase("reward"):
                batch = await assembled(groups, parts.algorithm.targets, parts.sampling.temperature)
            with clock.phase("train"):
                trained = await parts.policy.update(batch)
            with clock.phase("sync"):
                report = await stream.publish(version_of(step + 1))
            metrics = [*trained, *sync_metrics(report), *stream.metrics()]
            if await close_step(parts, outcome, clock, step, groups, metrics):
                return
            del groups, batch  # see `run_fully_async`
