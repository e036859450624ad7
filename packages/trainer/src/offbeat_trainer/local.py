"""A run in one process, without Ray: one training rank, one replica. For reading, debugging and tests.

Nothing here is a stand-in: engine, replica, manager and transport are the ones a cluster uses.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.source.sender import LocalSource, Sender
from offbeat_trainer.weights.member import make_member
from offbeat_trainer.weights.source import EngineWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_ckptsync import SyncConfig, SyncReport
    from offbeat_engine import Engine, TrainBatch
    from offbeat_rollout import RolloutEngine
    from offbeat_trainer.learner import Learner
    from offbeat_trainer.metrics import Metric

_Result = TypeVar("_Result")


class LocalPolicy:
    """Satisfies `Policy` with a learner in this process, whose calls run in one thread of their own."""

    def __init__(self, learner: Learner, *, timeout_s: float) -> None:
        """Train through `learner`; every call must end within `timeout_s`."""
        self._learner = learner
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")

    async def update(self, batch: TrainBatch) -> list[Metric]:
        """See `Policy.update`."""
        return await self._call(lambda: self._learner.update(batch))

    async def supervise(self, batch: TrainBatch) -> list[Metric]:
        """See `Policy.supervise`."""
        return await self._call(lambda: self._learner.supervise(batch))

    async def evaluate(self, batch: TrainBatch) -> list[Metric]:
        """See `OfflinePolicy.evaluate`."""
        return await self._call(lambda: self._learner.evaluate(batch))

    async def save(self, step: int, *, block: bool) -> None:
        """See `Policy.save`."""
        await self._call(lambda: self._learner.save(step, block=block))

    async def load(self, step: int | None) -> int | None:
        """See `Policy.load`."""
        return await self._call(lambda: self._learner.load(step))

    async def export(self, path: str) -> None:
        """See `Policy.export`."""
        await self._call(lambda: self._learner.export(path))

    async def _call(self, work: Callable[[], _Result]) -> _Result:
        async with asyncio.timeout(self._timeout_s):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class LocalPublisher:
    """Satisfies the trainer's `Publisher` between an engine and one replica of this process."""

    def __init__(self, manager: CheckpointEngineManager) -> None:
        """Publish through `manager`."""
        self._manager = manager

    @classmethod
    async def between(cls, engine: Engine, replica: RolloutEngine, sync: SyncConfig) -> LocalPublisher:
        """Connect `engine` to a started `replica`."""
        source = LocalSource(Sender(EngineWeights(engine), sync))
        manager = CheckpointEngineManager(source, sync)
        manager.add(await make_member("replica 0", replica, sync))
        return cls(manager)

    async def publish(self, version: int) -> SyncReport:
        """See `Publisher.publish`."""
        return await self._manager.sync(version)
