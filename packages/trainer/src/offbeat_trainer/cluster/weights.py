"""Weight sync over the cluster: the manager here, the source in training rank 0, one member in each replica."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from offbeat_ckptsync import SyncError, SyncFailed
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_trainer.cluster.waits import answer
from offbeat_trainer.errors import WorkerGone

if TYPE_CHECKING:
    from offbeat_ckptsync import SyncConfig, SyncReport
    from offbeat_ckptsync.values import Echo, Flip, Label, Sent, Status, SyncOffer
    from offbeat_trainer.cluster.rollout_group import RolloutGroup
    from offbeat_trainer.cluster.train_group import TrainGroup

log = logging.getLogger(__name__)

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
    """Satisfies all that members may do but for peers: forwards to the receiving end in a replica's process."""

    def __init__(self, name: str, handle: Any, config: SyncConfig, rollout: RolloutGroup) -> None:  # noqa: ANN401
        self._name = name
        self._handle = handle
        self._config = config
        self._rollout = rollout

    @property
    def name(self) -> str:
        """The replica's name."""
        return self._name

    async def begin(self, offer: SyncOffer) -> str | None:
        """Forward."""
        return await self._ask(
            self._handle.begin.remote(offer), "agree to a sync", self._config.begin_timeout_s
        )

    async def transfer(self, offer: SyncOffer) -> list[Echo]:
        """Forward."""
        return await self._ask(
            self._handle.transfer.remote(offer), "receive weights", self._config.transfer_timeout_s
        )

    async def verify(self, offer: SyncOffer, sent: Sent) -> None:
        """Forward."""
        await self._ask(
            self._handle.verify.remote(offer, sent), "compare digests", self._config.verify_timeout_s
        )

    async def flip(self, offer: SyncOffer, sent: Sent) -> Flip:
        """Forward, and draw the pause on the replica's track."""
        flip: Flip = await self._ask(
            self._handle.flip.remote(offer, sent), "change over", self._config.flip_timeout_s
        )
        self._rollout.timeline.past(self._name, "paused", flip.pause_s, version=sent.version)
        return flip

    async def commit(self, label: Label) -> Label:
        """Forward."""
        return await self._ask(
            self._handle.commit.remote(label), "commit a version", self._config.commit_timeout_s
        )

    async def canary(self) -> list[float]:
        """Forward."""
        return await self._ask(
            self._handle.canary.remote(), "answer the canary", self._config.commit_timeout_s
        )

    async def status(self) -> Status:
        """Forward."""
        return await self._ask(
            self._handle.status.remote(), "say what it serves", self._config.begin_timeout_s
        )

    async def fence(self, reason: str) -> None:
        """Forward."""
        await self._ask(self._handle.fence.remote(reason), "be fenced off", self._config.begin_timeout_s)

    async def abort(self, sync_id: str) -> int:
        """Forward."""
        return await self._ask(
            self._handle.abort_sync.remote(sync_id), "drop staged weights", self._config.begin_timeout_s
        )

    async def _ask(self, call: Any, what: str, timeout_s: float) -> Any:  # noqa: ANN401
        return await answer(call, owner=self._name, what=what, timeout_s=timeout_s + SLACK_S)


class ClusterPublisher:
    """Satisfies `Publisher` with a manager whose members are the replicas; brings replacements in, too.

    A replica that is lost in the middle of a sync does not fail it while another lives: the sync is made again with
    those that are left. A replacement joins at the committed version, for which the training weights must stand still
    and be those of that version: between two steps, or right after the next sync. Where nobody serves and training has
    moved on (`sync_every` > 1), it gets the weights of now, under the version that they are.
    """

    def __init__(self, train: TrainGroup, rollout: RolloutGroup, config: SyncConfig) -> None:
        self._train = train
        self._rollout = rollout
        self._config = config
        self._manager = CheckpointEngineManager(RemoteSource(train), config, on_fence=self._fence)
        for name, handle in rollout.handles.items():
            self._manager.add(RemoteMember(name, handle, config, rollout))
        self._report: SyncReport | None = None  # of the version last committed
        self._updates = 0  # that training had made then
        self._waiting: dict[str, tuple[RemoteMember, asyncio.Future[None]]] = {}
        rollout.joiner = self

    async def publish(self, version: int) -> SyncReport:
        """Sync every replica and let those that serve `version` have traffic again.

        Raises:
            SyncFailed: not one replica changed over, and none of them is to blame.
            NoReplica: all were lost, and no replacement came in time.
        """
        while True:
            async with self._train.standing:
                if self._report is not None and self._report.version == version:
                    return self._report  # a rescue has brought it already
                if self._members_left() and await self._sync(version):
                    await self._take_in()
                    assert self._report is not None
                    return self._report
            if not self._members_left():
                await self._rollout.until(lambda: bool(self._waiting) or bool(self._rollout.serving))

    async def join(self, name: str, handle: Any) -> None:  # noqa: ANN401
        """See `Joiner.join`."""
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._manager.remove(name)
        self._waiting[name] = (RemoteMember(name, handle, self._config, self._rollout), arrived)
        self._rollout.touch()
        try:
            await self.rescue()
            await arrived  # at the latest with the next sync, which has deadlines
        finally:
            if self._waiting.get(name, (None, None))[1] is arrived:
                del self._waiting[name]

    async def rescue(self) -> None:
        """See `Joiner.rescue`."""
        async with self._train.standing:
            await self._take_in()

    async def _take_in(self) -> None:
        """Let in who waits, if the weights that stand may be served. Nothing trains meanwhile."""
        if self._report is None:
            return
        ahead = self._train.updates - self._updates
        if ahead == 0:
            for name, (member, _) in list(self._waiting.items()):
                await self._catch_up(name, member)
        elif not self._rollout.serving and self._members_left():
            await self._sync(self._report.version + ahead)

    async def _catch_up(self, name: str, member: RemoteMember) -> None:
        assert self._report is not None
        try:
            await self._manager.catch_up(member)
        except (SyncError, ConnectionError, TimeoutError) as error:
            self._refuse(name, str(error))
        else:
            self._admit(name, self._report.version)

    async def _sync(self, version: int) -> bool:
        """Bring the members to `version`; False if some of them were lost and it should be tried with the rest.

        Raises:
            SyncFailed: it failed, and all members are well.
        """
        before = self._manager.members
        try:
            report = await self._manager.sync(version)
        except SyncFailed as failed:
            log.warning("version %d: %s", version, failed)
            unwell = await self._rollout.unwell(before)
            for name, reason in unwell.items():
                self._manager.remove(name)
                self._refuse(name, reason)
            if self._manager.members == before:
                raise
            return False
        self._report, self._updates = report, self._train.updates
        for name in report.members:
            self._admit(name, version)
        return True

    def _members_left(self) -> bool:
        """Forget who was lost; where that was everybody, those who wait to join are the members."""
        for name in self._manager.members:
            if name in self._rollout.lost and name not in self._waiting:
                self._manager.remove(name)
        if not self._manager.members:
            for member, _ in self._waiting.values():
                self._manager.enlist(member)
        return bool(self._manager.members)

    def _admit(self, name: str, version: int) -> None:
        self._rollout.admit(name, version)
        if name in self._waiting:
            self._waiting.pop(name)[1].set_result(None)

    def _refuse(self, name: str, reason: str) -> None:
        """End the wait of a replacement that did not come through: it is replaced in its turn."""
        if name in self._waiting:
            self._waiting.pop(name)[1].set_exception(WorkerGone(f"{name} could not join: {reason}"))

    async def _fence(self, name: str, reason: str) -> None:
        await asyncio.sleep(0)
        self._refuse(name, reason)
        self._rollout.lose(name, reason)
