"""Training on what the policy samples: generate, score, train, publish. One loop; its modes are settings of the stream.

sync            generate 0 | train 0 | generate 1 | train 1 |    the weights that sample are the weights that learn

one step off    generate 0 1 | generate 2 | generate 3 |         the groups of step k + 1 are made while step k trains;
| train 0    | train 1    |         every token but those of step 0 is one version old

fully async     generation streams; a step trains as soon as enough whole groups are there. How far the two may drift
apart is the gate's affair (`offbeat_trainer.loops.buffer`): no trained token is more than
`max_staleness` versions old. With 0 this is sync, batch for batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from offbeat_trainer.config import Order, Partial
from offbeat_trainer.data.assemble import assembled
from offbeat_trainer.data.types import version_of
from offbeat_trainer.loops.outcome import close_step, open_run
from offbeat_trainer.loops.stream import open_stream

if TYPE_CHECKING:
    from offbeat_trainer.config import AsyncConfig
    from offbeat_trainer.loops.outcome import Outcome
    from offbeat_trainer.loops.session import Session


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
            if await close_step(
                session, outcome, clock, step, groups, [*trained, *await stream.metrics(step)]
            ):
                return
            # To free thousands of completions takes milliseconds: now, not once the next step's are there.
            del groups, batch
