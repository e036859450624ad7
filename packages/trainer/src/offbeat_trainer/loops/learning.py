"""One step of training, as every loop makes it once it has scored groups."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from offbeat_trainer.data.assemble import assemble

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_engine import TrainBatch
    from offbeat_trainer.data.types import Group
    from offbeat_trainer.metrics import Metric
    from offbeat_trainer.stream.parts import Parts
    from offbeat_trainer.watch.phases import PhaseClock


async def learn(parts: Parts, clock: PhaseClock, groups: Sequence[Group]) -> tuple[list[Group], list[Metric]]:
    """Train one step on scored groups; return them, and what happened.

    The batch is made in a thread: a large one takes seconds, in which requests are routed and answers read.
    """
    with clock.phase("reward"):
        batch = await asyncio.to_thread(_batch, parts, groups)
    with clock.phase("train"):
        trained = await parts.policy.update(batch)
    return list(groups), list(trained)


def _batch(parts: Parts, groups: Sequence[Group]) -> TrainBatch:
    return assemble(groups, parts.algorithm.targets(groups), temperature=parts.sampling.temperature)
