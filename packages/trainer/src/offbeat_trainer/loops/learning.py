"""One step of training, as every loop makes it once it has scored groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_trainer.assemble import assemble

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_trainer.loops.parts import Parts
    from offbeat_trainer.metrics import Metric
    from offbeat_trainer.phases import PhaseClock
    from offbeat_trainer.types import Group


async def learn(parts: Parts, clock: PhaseClock, groups: Sequence[Group]) -> tuple[list[Group], list[Metric]]:
    """Train one step on scored groups; return them, and what happened."""
    with clock.phase("reward"):
        targets = parts.algorithm.targets(groups)
        batch = assemble(groups, targets, temperature=parts.sampling.temperature)
    with clock.phase("train"):
        trained = await parts.policy.update(batch)
    return list(groups), list(trained)
