"""Ray as a carrier of a sync's operations: to the process of a replica, or to the training ranks, and back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from offbeat_ckptsync.control.source_ranks import PASS, SourceRanks
from offbeat_trainer.cluster.waits import answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat_ckptsync.toolkit.ops import Call
    from offbeat_ckptsync.toolkit.wire import Json
    from offbeat_ckptsync.values import Sent, SyncOffer
    from offbeat_trainer.cluster.train_group import TrainGroup
    from offbeat_trainer.watch.watchdog import Timeline


def to_replica(name: str, handle: Any, timeline: Timeline | None = None) -> Call:  # noqa: ANN401
    """Return the way to the replica `name` in the process `handle`, which has `sync_op`; pauses are drawn on its track.

    Its waits end with the process; their deadlines are the manager's, which name the phase.
    """

    async def call(op: str, request: Json) -> Json:
        what = f"do {op!r} of a weight sync"
        outcome: Json = await answer(
            handle.sync_op.remote(op, request), owner=name, what=what, timeout_s=None
        )
        if op == "flip" and "ok" in outcome and timeline is not None:
            flip = cast("dict[str, dict[str, Any]]", outcome["ok"])["flip"]
            timeline.past(name, "paused", flip["pause_s"], version=flip["version"])
        return outcome

    return call


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
        self._told = asyncio.Event()  # the calls for it are made
        super().__init__(self._carry, group.num_ranks, beside)

    async def offer(self, version: int, members: list[str]) -> SyncOffer:
        """Prepare to send, at an address that these members reach: rank 0's node's, or each rank's own loopback."""
        if not self._by_neighbours:
            host = self._group.host_for({name: self._nodes[name] for name in members})
            if host != self._host:
                await self._group.control("meet_at", {0: (host,)}, what="let members meet it")
                self._host = host
        return await super().offer(version, members)

    async def gather(self, offer: SyncOffer) -> bool:
        """Let the ranks copy out what `send` sends, and return once they are told to.

        A rank does its work in the order of the calls: nothing that it is given from now on changes what it copies.
        """
        self._told = told = asyncio.Event()
        self._gathering = asyncio.create_task(super().gather(offer), name=f"gather {offer.version}")
        self._gathering.add_done_callback(lambda _: told.set())
        await told.wait()
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
                "sync_op", calls, what="do 'send' of a weight sync", told=self._told.set
            )
        calls = {rank: (op, request) for rank, request in requests.items()}
        group = "send" if op == "send" else "control"  # a sync is given up beside its sending
        return await self._group.each("sync_op", calls, what=f"do {op!r} of a weight sync", group=group)
