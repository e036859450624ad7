"""One step off: the groups of step k + 1 are generated while step k trains; every token is exactly one version old.

    generation   steps 0 and 1 |  step 2  |  step 3  |  step 4  |
    training                   |  step 0  |  step 1  |  step 2  |
    version                    1          2          3          4

Only step 0 trains fresh tokens: nothing could be generated before it. Nothing is under way when weights change, so which
weights made which token depends on the step and never on timing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from offbeat_trainer.loops.sync import in_turns, run_sync

if TYPE_CHECKING:
    from offbeat_trainer.config import AsyncConfig
    from offbeat_trainer.loops.outcome import Outcome
    from offbeat_trainer.stream.parts import Parts


def one_step_off(mode: AsyncConfig) -> AsyncConfig:
    """Return what one step off makes of `mode`: in turns, but one version behind."""
    return replace(in_turns(mode), max_staleness=1)


async def run_one_step_off(parts: Parts, outcome: Outcome, start: int = 0) -> None:
    """Train from step `start` to the last, or to the first step boundary after a stop was requested.

    See `run_sync`; while a step trains, the groups of the next one are generated.
    """
    await run_sync(parts, outcome, start, mode=one_step_off(parts.asynchrony))
