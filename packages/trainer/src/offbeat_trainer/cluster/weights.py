"""Weight sync over the cluster: the manager here, the source in training rank 0, one member in each replica."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from offbeat_ckptsync.manager import CheckpointEngineManager
from offbeat_trainer.cluster.waits import answer

if TYPE_CHECKING:
    from offbeat_ckptsync import Echo, Flip, Sent, SyncConfig, SyncOffer, SyncReport
    from offbeat_trainer.cluster.rollout_group import RolloutGroup
    from offbeat_trainer.cluster.train_group import TrainGroup

SLACK_S = 5.0
"""Added to the deadline of a remote call: the manager's own deadline, which names the phase, should come first."""


class RemoteSource:
    """Satisfies `Source`: rank 0 sends while the other ranks walk along, because gathering is a collective."""

    def __init__(self, group: TrainGroup) -> None:
        self._group = group

    async def offer(self, version: int, members: list[str]) -> SyncOffer:
        """Let rank 0 prepare."""
        return await self._group.control("offer_weights", version, members, what=f"offer version {version}")

    async def send(self, offer: SyncOffer) -> Sent:
        """Let all ranks iterate their weights; rank 0 sends them."""
        return (await self._group.call("send_weights", offer, what=f"send version {offer.version}"))[0]

    async def abort(self, sync_id: str) -> None:
        """Let rank 0 give up; a `send` that runs ends by itself."""
        await self._group.control("abort_weights", sync_id, what="give up a sync")


class RemoteMember:
    """Satisfies `Member`: forwards to the receiving end in a replica's process."""

    def __init__(self, name: str, handle: Any, config: SyncConfig) -> None:  # noqa: ANN401
        self._name = name
        self._handle = handle
        self._config = config

    @property
    def name(self) -> str:
        """The replica's name."""
        return self._name

    async def begin(self, offer: SyncOffer) -> None:
        """Forward."""
        await self._ask(self._handle.begin.remote(offer), "agree to a sync", self._config.begin_timeout_s)

    async def transfer(self, offer: SyncOffer) -> list[Echo]:
        """Forward."""
        return await self._ask(
            self._handle.transfer.remote(offer), "receive weights", self._config.transfer_timeout_s
        )

    async def flip(self, offer: SyncOffer, sent: Sent) -> Flip:
        """Forward."""
        return await self._ask(
            self._handle.flip.remote(offer, sent), "change over", self._config.flip_timeout_s
        )

    async def abort(self, sync_id: str) -> int:
        """Forward."""
        return await self._ask(
            self._handle.abort_sync.remote(sync_id), "drop staged weights", self._config.begin_timeout_s
        )

    async def _ask(self, call: Any, what: str, timeout_s: float) -> Any:  # noqa: ANN401
        return await answer(call, owner=self._name, what=what, timeout_s=timeout_s + SLACK_S)


class ClusterPublisher:
    """Satisfies `Publisher` with a manager whose members are the replicas."""

    def __init__(self, train: TrainGroup, rollout: RolloutGroup, config: SyncConfig) -> None:
        self._rollout = rollout
        self._manager = CheckpointEngineManager(RemoteSource(train), config, on_fence=self._fence)
        for name, handle in rollout.handles.items():
            self._manager.add(RemoteMember(name, handle, config))

    async def publish(self, version: int) -> SyncReport:
        """Sync every replica and let those that serve `version` have traffic again."""
        report = await self._manager.sync(version)
        for name in report.members:
            self._rollout.admit(name, version)
        return report

    async def _fence(self, name: str, reason: str) -> None:
        await asyncio.sleep(0)
        self._rollout.fence(name, reason)
