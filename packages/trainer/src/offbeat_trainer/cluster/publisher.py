"""Weight sync over the cluster: the manager here, the source in training rank 0, one member in each replica."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from offbeat_ckptsync import SyncError, SyncFailed
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.source_ranks import PASS, SourceRanks
from offbeat_ckptsync.errors import VersionError
from offbeat_ckptsync.values import Phase
from offbeat_trainer.errors import WorkerGone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from offbeat_ckptsync import SyncConfig, SyncReport
    from offbeat_ckptsync.seams import Member
    from offbeat_ckptsync.toolkit.wire import Json
    from offbeat_ckptsync.values import Sent, SyncOffer
    from offbeat_trainer.cluster.rollout_group import RolloutGroup
    from offbeat_trainer.cluster.train_group import TrainGroup

log = logging.getLogger(__name__)

MAX_SYNCS = 3
"""How often a sync is tried that fails while its members are well: before the flip a failure leaves the old weights whole."""
PAUSE_S = 1.0
"""Between two tries."""


class TrainSource(SourceRanks):
    """The training ranks as a source. Rank 0 sends to all replicas; where they share devices, each rank to its own replica's ranks."""

    def __init__(
        self, group: TrainGroup, nodes: Mapping[str, str], beside: Callable[[str], Sequence[int]] | None
    ) -> None:
        """Send what `group` trains to members on the machines `nodes`, by name, which may change between syncs.

        `beside` says which ranks share the devices of a member; without it rank 0 sends.
        """
        self._group = group
        self._nodes = nodes
        self._by_neighbours = beside is not None
        self._host = ""  # where members were told to meet rank 0
        self._gathering: asyncio.Task[bool] | None = None  # until it is sent
        self._called = asyncio.Event()  # the calls for it are made
        super().__init__(self._carry, group.num_ranks, beside)

    async def offer(self, version: int, members: list[str]) -> SyncOffer:
        """Prepare to send, at an address that these members reach: rank 0's node's, or each rank's own loopback."""
        if not self._by_neighbours:
            host = self._group.host_for({name: self._nodes[name] for name in members})
            if host != self._host:
                await self._group.each("meet_at", {0: (host,)}, what="let members meet it", group="control")
                self._host = host
        return await super().offer(version, members)

    async def gather(self, offer: SyncOffer) -> bool:
        """Let the ranks copy out what `send` sends, and return once they are told to.

        A rank does its work in the order of the calls: nothing that it is given from now on changes what it copies.
        """
        self._called = called = asyncio.Event()
        self._gathering = asyncio.create_task(super().gather(offer), name=f"gather {offer.version}")
        self._gathering.add_done_callback(lambda _: called.set())
        await called.wait()
        return True

    async def send(self, offer: SyncOffer) -> Sent:
        """See `SourceRanks.send`; raises also what `gather` failed of."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            await gathering
        return await super().send(offer)

    async def abort(self, sync_id: str) -> None:
        """See `SourceRanks.abort`."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.cancel()
        await super().abort(sync_id)

    async def _carry(self, op: str, requests: Mapping[int, Json]) -> Mapping[int, Json]:
        if op == PASS:
            calls = {rank: (str(each["op"]), each["request"]) for rank, each in requests.items()}
            return await self._group.each(
                "sync_op", calls, what="do 'send' of a weight sync", on_called=self._called.set
            )
        calls = {rank: (op, request) for rank, request in requests.items()}
        group = "send" if op == "send" else "control"  # a sync is given up beside its sending
        return await self._group.each("sync_op", calls, what=f"do {op!r} of a weight sync", group=group)


class ClusterPublisher:
    """Satisfies `Publisher` with a manager whose members are the replicas, and brings replacements in, as a `Joiner` does.

    A replica that is lost in the middle of a sync does not fail it while another lives: the sync is run again with
    those that are left. A sync that fails while all of them are well is tried `MAX_SYNCS` times. If training has moved on by then,
    the next try brings the newer weights, under their own version. A replacement joins at the committed version, for which the
    training weights must stand still and be those of that version: between two steps, or right after the next sync. Where nobody
    serves and training has moved on (`sync_every` > 1), it gets the weights of now, under the version that they are.
    """

    def __init__(self, train: TrainGroup, rollout: RolloutGroup, config: SyncConfig) -> None:
        self._train = train
        self._rollout = rollout
        self._manager = CheckpointEngineManager(
            TrainSource(train, rollout.nodes, _neighbours(train, rollout, config)),
            config,
            on_fence=self._fence,
            on_failure=self._lose_unwell,
        )
        for member in rollout.members.values():
            self._manager.add(member)
        self._report: SyncReport | None = None  # of the version last committed
        self._updates = 0  # that training had made then
        self._turn = asyncio.Lock()  # of who syncs; it is taken before `train.standing`
        self._num_lost = 0  # members of syncs that failed
        self._waiting: dict[str, tuple[Member, asyncio.Future[None]]] = {}
        self._may_wait = False  # the last that could not catch up may take part in the next sync

    async def publish(self, version: int, gathered: Callable[[], None] | None = None) -> SyncReport:
        """Sync every replica and let those that serve `version` have traffic again; see `Publisher.publish`.

        Raises:
            SyncFailed: not one replica changed over in `MAX_SYNCS` tries, and none of them is to blame.
            NoReplica: all were lost, and no replacement came in time.
        """
        failures: list[str] = []
        fenced: dict[str, str] = {}
        num_unexplained = 0
        for again in chain([False], repeat(True)):
            num_lost = self._num_lost
            try:
                if (report := await self._publish(version, gathered, again=again)) is not None:
                    failures += report.failures
                    return replace(report, failures=tuple(failures), fenced=fenced | report.fenced)
            except SyncFailed as failed:
                failures.append(str(failed))
                fenced |= failed.silent
                if self._num_lost == num_lost and self._manager.members:
                    num_unexplained += 1
                    if num_unexplained == MAX_SYNCS:
                        raise
                    log.warning("the sync of version %d is tried again in %g s: %s", version, PAUSE_S, failed)
                    await asyncio.sleep(PAUSE_S)
            if not self._members_left():
                await self._rollout.until(lambda: bool(self._waiting) or bool(self._rollout.serving))
        raise AssertionError("it is tried until it ends")

    async def _publish(
        self, version: int, gathered: Callable[[], None] | None, *, again: bool
    ) -> SyncReport | None:
        """Sync once; None where nobody is left to sync with. `again`: training may have moved on. Raises `SyncFailed`."""
        async with self._turn, self._standing() as let_go:
            if self._report is not None:
                if again:
                    version = max(version, self._report.version + self._train.updates - self._updates)
                if self._report.version == version:
                    return self._report  # a rescue has brought it already
            if not self._members_left():
                return None

            def copied() -> None:
                assert gathered is not None
                let_go()
                gathered()

            # A replica that waits to join needs these weights, too.
            early = None if gathered is None or self._waiting else copied
            await self._sync(version, early)
            if early is None:
                await self._take_in()
            return self._report

    @asynccontextmanager
    async def _standing(self) -> AsyncGenerator[Callable[[], None]]:
        """Let the weights stand still in the block, or until what this gives is called."""
        await self._train.standing.acquire()
        with ExitStack() as held:
            held.callback(self._train.standing.release)
            yield held.close

    async def join(self, member: Member) -> None:
        """See `Joiner.join`."""
        name = member.name
        self._manager.remove(name)
        if await self._comes_from_a_peer(member):
            return
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[name] = (member, arrived)
        self._rollout.touch()
        try:
            await self.rescue()
            await arrived  # at the latest with the next sync, which has deadlines
        finally:
            if self._waiting.get(name, (None, None))[1] is arrived:
                del self._waiting[name]

    async def _comes_from_a_peer(self, member: Member) -> bool:
        """Bring a replacement to the committed version by what another replica kept of it, while training goes on."""
        if self._report is None or self._rollout.devices_free is not None:
            return False  # on shared devices it may not load while something trains
        if why := await self._catch_up(member, peers_only=True):
            log.info("%s gets nothing from the other replicas: %s", member.name, why)
        return not why

    async def rescue(self) -> None:
        """See `Joiner.rescue`."""
        async with self._turn, self._train.standing:
            await self._take_in()

    async def _take_in(self) -> None:
        """Let in who waits, if the weights that stand may be served. Nothing trains meanwhile."""
        if self._report is None:
            return
        ahead = self._train.updates - self._updates
        if ahead == 0:
            for name, (member, _) in list(self._waiting.items()):
                if name in self._manager.members:
                    continue  # it waits for the next sync
                if why := await self._catch_up(member):
                    if self._may_wait and self._rollout.serving:
                        log.info("%s gets the weights with the next sync: %s", name, why)
                        self._manager.enlist(member)
                    else:
                        self._refuse(name, why)
        elif not self._rollout.serving and self._members_left():
            try:
                await self._sync(self._report.version + ahead)
            except SyncFailed:
                if self._manager.members:
                    raise

    async def _catch_up(self, member: Member, *, peers_only: bool = False) -> str:
        """Bring a replacement to the committed version and give it traffic; return why that failed, or ""."""
        try:
            await self._manager.catch_up(member, peers_only=peers_only)
        except (SyncError, ConnectionError, TimeoutError) as error:
            # The committed content cannot be had (again): the next sync brings it another.
            self._may_wait = isinstance(error, SyncFailed) and isinstance(error.__cause__, VersionError)
            return str(error)
        assert self._manager.version is not None
        self._admit(member.name, self._manager.version)
        return ""

    async def _sync(self, version: int, gathered: Callable[[], None] | None = None) -> None:
        """Bring the members to `version`, without those who are lost meanwhile. Raises `SyncFailed`, also if all were."""
        updates = self._train.updates
        report = await self._manager.sync(version, gathered=gathered)
        self._report, self._updates = report, updates
        for name in report.members:
            self._admit(name, version)

    async def _lose_unwell(self, names: list[str], failed: SyncFailed) -> None:
        """Ask the members of a sync that failed for their health, and forget those that are not well."""
        log.warning("%s", failed)
        for name, reason in (await self._rollout.unwell(names)).items():
            self._num_lost += 1
            self._manager.remove(name)
            self._refuse(name, reason)

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
        self._num_lost += 1
        self._refuse(name, reason)
        phase, _, _ = reason.partition(":")
        if phase in (Phase.BEGIN, Phase.TRANSFER, Phase.VERIFY):
            self._rollout.set_aside(name, reason)
        else:  # what it holds now nobody knows
            self._rollout.lose(name, reason)


_BETWEEN_NEIGHBOURS = ("auto", "cuda_ipc", "shm")
"""Transports by which neighbours move less than one sender would; the others go through a network or a disk."""


def _neighbours(
    train: TrainGroup, rollout: RolloutGroup, config: SyncConfig
) -> Callable[[str], Sequence[int]] | None:
    """Return who says which ranks share a replica's devices, where each of several ranks is to send to its own neighbours."""
    apart = rollout.shares_devices and train.num_ranks > 1 and config.transport in _BETWEEN_NEIGHBOURS
    return rollout.ranks_beside if apart else None
