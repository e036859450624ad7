"""One rank per machine receives, its neighbours read: between machines `broadcast`, within one the segment of `shm`.

Every rank says at the source's store on which machine it is and where it could be called (`line`). The source names the first
rank of each machine its relay; those on its own machine, where payloads are in host memory, read what it packs.

A relay takes part in the broadcast as `relay <member>/<rank>`, receives every bucket into a segment (from a GPU through two
landing buckets), digests it once, and tells the ranks of its machine, itself among them. They map the segment, and echo the digest of
the one who took it of the very pages that they load from. So a machine receives, digests and holds a version once, in host memory,
whatever the number of its ranks.
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from offbeat_ckptsync.ends.buckets import bucket_starts, buckets_of, oldest_first
from offbeat_ckptsync.ends.digest import digest
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.seams import BucketReceiver, BucketSender, Transport
from offbeat_ckptsync.toolkit.threads import SideStream, own_device, use_device
from offbeat_ckptsync.transports.broadcast import BroadcastTransport
from offbeat_ckptsync.transports.rendezvous import Rendezvous, here, machine_of
from offbeat_ckptsync.transports.shm import ShmTransport
from offbeat_ckptsync.values import Bucket, RankId, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from offbeat_ckptsync.toolkit.config import SyncConfig

Node = dict[str, Any]
"""What the source says of one machine: "rank_ids", "address", "token", and "relayed", whether the first rank_id is a relay."""

_NUM_LANDINGS = 2


class RelayTransport(Transport):
    """Satisfies `Transport` across machines with several ranks each."""

    def __init__(self, config: SyncConfig, *, machine: str = "") -> None:
        """Listen, as a source, on `config.host`; what crosses between machines lives on `config.device`. `machine`: this one's name.

        Without it, ranks share a machine if they share its boot, user and network namespace.
        """
        self.device = own_device(config.device)
        self._machine = machine or machine_of(here("cpu"))
        self._wire = BroadcastTransport(config)
        self.rendezvous = Rendezvous(
            "relay", config, asked="node", told="nodes", beside=self._wire.rendezvous
        )
        self._near = ShmTransport()
        self._nodes: dict[str, list[Node]] = {}  # by sync, at the source
        self._members: dict[str, list[str]] = {}

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Host the store (once) and say where it is."""
        self._members = {sync_id: list(members)}
        return self._wire.open(sync_id, members)

    def lend(self, offer: SyncOffer, num_bytes: int) -> torch.Tensor | None:
        """Wait until everybody has said where they are; lend the segment that ranks of this machine read, if there are any."""
        near = [node for node in self._meet(offer) if not node["relayed"]]
        return self._near.lend(offer, num_bytes) if near else None

    def sender(self, offer: SyncOffer, members: list[str]) -> _Sender:
        """Meet the ranks of this machine and the relays of the others."""
        nodes = self._nodes.get(offer.sync_id) or self._meet(offer)
        ends: list[BucketSender] = [
            self._near.sender(offer, [], _rank_ids(node)) for node in nodes if not node["relayed"]
        ]
        relays = [_name(node) for node in nodes if node["relayed"]]
        if relays:
            ends.append(self._wire.sender(_on_wire(offer), relays))
        return _Sender(ends)

    def receiver(self, offer: SyncOffer, rank_id: RankId) -> _Reader:
        """Say where this rank is, and read from its relay; become that relay where the source says so."""
        place = {"node": self._machine, **self._near.open(offer.sync_id, [])}
        self.rendezvous.answer(offer, rank_id, place)
        nodes: list[Node] = self.rendezvous.hear(offer, rank_id)["nodes"]
        node = next(node for node in nodes if (rank_id.member, rank_id.rank) in _rank_ids(node))
        limits = {name: offer.endpoint[name] for name in ("timeout_s", "rendezvous_s")}
        endpoint = {"address": node["address"], "token": node["token"], **limits}
        near = dataclasses.replace(offer, transport="relay", endpoint=endpoint)
        pump = None
        if node["relayed"] and (rank_id.member, rank_id.rank) == _rank_ids(node)[0]:
            pump = _Pump(self._wire, self._near, offer, near, node)
        try:
            return _Reader(self._near.receiver(near, rank_id), near, node, rank_id, pump)
        except TransferError as error:
            raise _named(error, node, rank_id, pump) from error

    def abort(self, sync_id: str) -> None:
        """End the waits of `sync_id` here, those of a relay too."""
        self.rendezvous.abort(sync_id)
        if (
            sync_id not in self._members
        ):  # a relay's: what comes late is written there, so no later sync may take it
            self._near.discard(sync_id)
        self._wire.abort(sync_id)
        self._near.abort(sync_id)

    def trim(self) -> None:
        """Give back segments that nobody holds."""
        self._near.trim()

    def close(self) -> None:
        """Leave the group, the stores and the segments."""
        self._wire.close()
        self._near.close()
        self.rendezvous.close()

    def _meet(self, offer: SyncOffer) -> list[Node]:
        roll = self.rendezvous.call_roll(offer, self._members[offer.sync_id])
        nodes: dict[str, Node] = {}
        for member, words in roll.items():
            for rank, word in enumerate(words):
                own = word["node"] == self._machine and self.device == "cpu"
                at = self._near.open(offer.sync_id, []) if own else {k: word[k] for k in ("address", "token")}
                node = nodes.setdefault(word["node"], {"rank_ids": [], **at, "relayed": not own})
                node["rank_ids"].append([member, rank])
        self._nodes = {offer.sync_id: [*nodes.values()]}
        self.rendezvous.tell(offer, {"nodes": self._nodes[offer.sync_id]})
        return self._nodes[offer.sync_id]


class _Sender(BucketSender):
    def __init__(self, ends: list[BucketSender]) -> None:
        self._ends = ends

    def vouch(self, bucket: Bucket, digest: str) -> None:
        for end in self._ends:
            end.vouch(bucket, digest)

    def send(self, bucket: Bucket, payload: torch.Tensor) -> None:
        for end in self._ends:
            end.send(bucket, payload)

    def waits_for(self) -> str:
        return ", ".join(filter(None, (end.waits_for() for end in self._ends)))

    @property
    def in_flight(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return max((end.in_flight for end in self._ends), default=1)

    def start(self, bucket: Bucket, payload: torch.Tensor) -> Callable[[], None]:
        waits = [end.start(bucket, payload) for end in self._ends]

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def close(self) -> None:
        for end in self._ends:
            end.close()


class _Reader(BucketReceiver):
    """The end of one rank: it reads the segment of its relay, or of the source."""

    def __init__(
        self, end: BucketReceiver, offer: SyncOffer, node: Node, rank_id: RankId, pump: _Pump | None
    ) -> None:
        self._end = end
        self._offer = offer
        self._node = node
        self._rank_id = rank_id
        self._pump = pump

    @property
    def wire_bytes(self) -> int:
        return 0 if self._pump is None else self._pump.num_bytes

    def lend(self, num_bytes: int) -> torch.Tensor | None:
        return self._end.lend(num_bytes)

    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        try:
            self._end.receive(bucket, into)
        except TransferError as error:
            raise _named(error, self._node, self._rank_id, self._pump) from error

    def told(self, bucket: Bucket) -> str | None:
        return self._end.told(bucket)

    def close(self) -> None:
        self._end.close()


class _Pump:
    """What a relay does beside receiving for itself: buckets come over the wire into its segment, and are told of."""

    def __init__(
        self, wire: BroadcastTransport, near: ShmTransport, offer: SyncOffer, own: SyncOffer, node: Node
    ) -> None:
        self._wire, self._near = wire, near
        self._offer, self._own, self._node = offer, own, node
        self._buckets = buckets_of(offer)
        self.failure: Exception | None = None
        self.num_bytes = 0  # that came over the wire
        # A daemon: a transport that hangs must not keep the process alive.
        threading.Thread(target=self._run, name=f"relay {offer.version}", daemon=True).start()

    def _run(self) -> None:
        try:
            use_device(self._wire.device)
            with SideStream(self._wire.device).after(), ThreadPoolExecutor(1, "relay digests") as pool:
                self._relay(pool)
        except Exception as error:  # noqa: BLE001 -- raised by this rank's own end
            self.failure = error
            self._near.discard(self._offer.sync_id)  # as `abort` does
            self._near.abort(self._offer.sync_id)

    def _relay(self, pool: ThreadPoolExecutor) -> None:
        starts, num_bytes = bucket_starts(self._buckets)
        segment = self._near.lend(self._own, num_bytes)
        end = self._wire.receiver(_on_wire(self._offer), RankId(member=_name(self._node)))
        sender = self._near.sender(self._own, [], _rank_ids(self._node))
        landings = self._landings()
        told: list[Future[None]] = []
        stream = SideStream(self._wire.device)

        def tell(bucket: Bucket, landed: torch.Tensor, place: torch.Tensor) -> None:
            with stream.after():
                taken = digest(landed)
                if landed is not place:
                    place.copy_(landed)
            sender.send(bucket, place, taken)

        def begun() -> Iterator[tuple[Callable[[], None], Bucket, torch.Tensor, torch.Tensor]]:
            for number, (bucket, start) in enumerate(zip(self._buckets, starts, strict=True)):
                place = landed = segment[start : start + bucket.num_bytes]
                if landings:
                    if number >= _NUM_LANDINGS:
                        told[number - _NUM_LANDINGS].result()  # its landing is this one's
                    landed = landings[number % _NUM_LANDINGS][: bucket.num_bytes]
                yield end.start(bucket, landed), bucket, landed, place

        for wait, bucket, landed, place in oldest_first(begun(), min(end.in_flight, _NUM_LANDINGS)):
            wait()
            self.num_bytes += bucket.num_bytes
            told.append(pool.submit(tell, bucket, landed, place))
        for each in told:
            each.result()
        end.close()
        sender.close()

    def _landings(self) -> list[torch.Tensor]:
        """Return the buckets of device memory in which payloads land; none where they land in the segment."""
        if self._wire.device == "cpu":
            return []
        size = max((bucket.num_bytes for bucket in self._buckets), default=1)
        return [torch.empty(size, dtype=torch.uint8, device=self._wire.device) for _ in range(_NUM_LANDINGS)]


def _on_wire(offer: SyncOffer) -> SyncOffer:
    """Return the offer as the relays have it among them."""
    return dataclasses.replace(offer, transport="broadcast")


def _rank_ids(node: Node) -> list[tuple[str, int]]:
    return [(str(member), int(rank)) for member, rank in node["rank_ids"]]


def _name(node: Node) -> str:
    member, rank = _rank_ids(node)[0]
    return f"relay {member}/{rank}"


def _named(error: TransferError, node: Node, rank_id: RankId, pump: _Pump | None) -> SyncError:
    """Say from whom a rank reads; what went wrong at a relay says its own rank."""
    if pump is not None and isinstance(pump.failure, SyncError):
        return pump.failure
    source = _name(node) if node["relayed"] else "the source"
    return TransferError(f"{rank_id} reads from {source}: {error}")
