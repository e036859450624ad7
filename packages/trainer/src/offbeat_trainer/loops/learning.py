"""One step of training, as every loop makes it once it has scored groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_trainer.assemble import assemble, with_advantages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_trainer.loops.parts import Parts
    from offbeat_trainer.metrics import Metric
    from offbeat_trainer.phases import PhaseClock
    from offbeat_trainer.types import Group


async def learn(parts: Parts, clock: PhaseClock, groups: Sequence[Group]) -> tuple[list[Group], list[Metric]]:
    """Train one step on scored groups; return them with their advantages, and what happened."""
    with clock.phase("reward"):
        groups = with_advantages(groups, parts.algorithm.advantage)
        batch = assemble(groups, temperature=parts.sampling.temperature)
    with clock.phase("train"):
        trained = await parts.policy.update(batch)
    return groups, list(trained)
