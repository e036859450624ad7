"""One step of training, as every loop makes it once it has scored groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_trainer.data.assemble import assemble

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_trainer.data.types import Group
    from offbeat_trainer.metrics import Metric
    from offbeat_trainer.stream.parts import Parts
    from offbeat_trainer.watch.phases import PhaseClock


async def learn(parts: Parts, clock: PhaseClock, groups: Sequence[Group]) -> tuple[list[Group], list[Metric]]:
    """Train one step on scored groups; return them, and what happened."""
    with clock.phase("reward"):
        targets = parts.algorithm.targets(groups)
        batch = assemble(groups, targets, temperature=parts.sampling.temperature)
    with clock.phase("train"):
        trained = await parts.policy.update(batch)
    return list(groups), list(trained)
