"""The weights of a run in one process, without Ray: one training rank (`learner.LocalPolicy`), one replica. For reading and tests.

Nothing here is a stand-in: engine, replica, manager and transport are the ones a cluster uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.source.sender import LocalSource, Sender
from offbeat_trainer.weights.member import make_member
from offbeat_trainer.weights.source import EngineWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_ckptsync import SyncConfig, SyncReport
    from offbeat_engine import Engine
    from offbeat_rollout import RolloutEngine


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

    async def publish(self, version: int, gathered: Callable[[], None] | None = None) -> SyncReport:
        """See `Publisher.publish`."""
        return await self._manager.sync(version, gathered=gathered)
