"""One process group from the source to every receiving rank: gloo for host memory, NCCL for GPUs.

The group is private (beside any default group) and is kept while the membership stays the same. Every sync begins
with a roll call on a TCPStore of the source:

    receiver: set <sync>/here/<member>/<rank> = {"num_ranks": .., "group": id of the group it is in, or ""}
    source:   wait for all of them; set <sync>/go = {"group": id, "seats": [[member, rank], ..]}

In a sync whose offer has `bases` each bucket is announced by a broadcast of 8 bytes: an int64, little-endian, the length
of the delta that follows, or -1 where the bucket itself does.

Buckets that only some ranks get (`audiences` of the offer) go to each of those alone, by point-to-point sends of the group.

If all are in the group that the source is in, that group is used; else all build the group of the new id, the source
as rank 0 and seats[i] as rank i + 1. A failure on any side drops its group, so the next sync builds a fresh one.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.plan.slices import parts_of
from offbeat_ckptsync.seams import BucketReceiver, BucketSender, Transport
from offbeat_ckptsync.store import Store
from offbeat_ckptsync.threads import own_device
from offbeat_ckptsync.transports.group import Group, Seats
from offbeat_ckptsync.transports.roll import Word, answer, call_roll, forget
from offbeat_ckptsync.values import Seat

if TYPE_CHECKING:
    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.values import Bucket, SyncOffer

_WHOLE = -1
"""Announced in place of a delta's length: the bucket comes whole."""


class BroadcastTransport(Transport):
    """Satisfies `Transport` over a process group; rank 0 is the source."""

    carries_deltas = True

    @classmethod
    def from_config(cls, config: SyncConfig) -> BroadcastTransport:
        """Make the one that a sync of these settings uses."""
        return cls(host=config.host, device=config.device)

    def __init__(self, *, host: str = "127.0.0.1", device: str = "cpu") -> None:
        """Listen, as a source, and bind gloo's sockets on `host`; payloads live on `device`."""
        self.device = own_device(device)
        self._host = host
        self._lock = threading.Lock()
        self._served: Store | None = None
        self._joined: dict[tuple[str, int], Store] = {}
        self._group: Group | None = None
        # Kept: a wait of a sync that is over may look only after the next one has begun.
        self._aborted: set[str] = set()

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Host the store (once) and say where it is."""
        with self._lock:
            if self._served is None:
                self._served = Store.serve(self._host)
            return {"host": self._served.host, "port": self._served.port}

    def lend(self, offer: SyncOffer, num_bytes: int) -> None:
        """Nothing to lend: buckets are packed into buffers."""

    def sender(self, offer: SyncOffer, members: list[str]) -> _Sender:
        """Call the roll and build or reuse the group."""
        store = self._served
        assert store is not None, "`open` comes first"
        roll = _call_roll(self, store, offer, members)
        seats: Seats = [[member, rank] for member in members for rank in range(roll[member][0]["num_ranks"])]
        group = self._group
        together = all(
            here["group"] == (group.id if group else "") for ranks in roll.values() for here in ranks
        )
        if group is None or group.seats != seats or not together:
            group = Group(uuid.uuid4().hex, seats)
            self._drop()
        store.set(f"{offer.sync_id}/go", json.dumps({"group": group.id, "seats": seats}))
        self._join_group(group, store, offer, rank=0)
        return _Sender(self, offer, group, store, seats)

    def receiver(self, offer: SyncOffer, seat: Seat) -> _Receiver:
        """Answer the roll call and build or reuse the group."""
        store = self._store_of(offer)
        timeout_s = float(offer.endpoint["rendezvous_s"])
        answer(store, f"{offer.sync_id}/here/", seat, {"group": self._group.id if self._group else ""})
        go = f"{offer.sync_id}/go"
        if store.wait([go], timeout_s, lambda: self.is_aborted(offer.sync_id)):
            raise TransferError(
                f"broadcast: rank {seat.rank} of {seat.member} waited {timeout_s:g} s for the source's word; a member "
                "is missing or the sync was aborted"
            )
        told = json.loads(store.get(go) or "{}")
        if self._group is None or self._group.id != told["group"]:
            self._drop()
            group = Group(told["group"], told["seats"])
            self._join_group(group, store, offer, rank=1 + told["seats"].index([seat.member, seat.rank]))
        assert self._group is not None
        return _Receiver(self, offer, self._group)

    def abort(self, sync_id: str) -> None:
        """End the waits of `sync_id` here and drop the group: what hangs in it is left to its deadline."""
        with self._lock:
            self._aborted.add(sync_id)
            self._joined = {}  # torch does not mend a connection that was cut: the next sync makes a new one
        self._drop()

    def close(self) -> None:
        """Leave the group and the stores."""
        self._drop()
        self._served = None
        self._joined.clear()

    def is_aborted(self, sync_id: str) -> bool:
        """Say whether `abort` was called for this sync."""
        return sync_id in self._aborted

    def failed(self, group: Group) -> None:
        """Forget a group in which something failed."""
        with self._lock:
            if self._group is group:
                self._group = None
        group.leave()

    def _drop(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.leave()

    def _store_of(self, offer: SyncOffer) -> Store:
        where = (str(offer.endpoint["host"]), int(offer.endpoint["port"]))
        if where not in self._joined:
            self._joined = {where: Store.join(*where, float(offer.endpoint["rendezvous_s"]))}
        return self._joined[where]

    def _join_group(self, group: Group, store: Store, offer: SyncOffer, *, rank: int) -> None:
        if self._group is group:
            return
        group.build(store, rank, self._host, self.device, float(offer.endpoint["rendezvous_s"]))
        with self._lock:
            self._group = group


def _call_roll(
    transport: BroadcastTransport, store: Store, offer: SyncOffer, members: list[str]
) -> dict[str, list[Word]]:
    try:
        return call_roll(
            store,
            f"{offer.sync_id}/here/",
            members,
            float(offer.endpoint["rendezvous_s"]),
            lambda: transport.is_aborted(offer.sync_id),
        )
    except TransferError as error:
        raise TransferError(f"broadcast: {error}") from error


class _End:
    sends = False

    def __init__(self, transport: BroadcastTransport, offer: SyncOffer, group: Group) -> None:
        self._transport = transport
        self._offer = offer
        self._group = group
        self._deadline = time.monotonic() + float(offer.endpoint["timeout_s"])
        seats = [Seat(member=str(member), rank=int(rank)) for member, rank in group.seats]
        self._parts = [parts_of(offer, seat) for seat in seats]  # of each rank but the source
        self._ranks: dict[int, list[int]] = {}  # that get the buckets of a part

    def move(self, bucket: Bucket, payload: torch.Tensor, what: str) -> None:
        if self._transport.is_aborted(self._offer.sync_id):
            raise TransferError(f"broadcast: aborted before bucket {bucket.index}")
        left_s = self._deadline - time.monotonic()
        ranks = self._audience(bucket)
        try:
            if len(ranks) == len(self._group.seats):
                self._group.broadcast(payload, left_s)
            elif self.sends:
                self._group.give(payload, ranks, left_s)
            else:
                self._group.take(payload, left_s)
        except (RuntimeError, TransferError) as error:  # TransferError: too late, or left by `abort`
            self._transport.failed(self._group)
            raise TransferError(
                f"broadcast: bucket {bucket.index} of version {self._offer.version} could not be {what}: {error}"
            ) from error

    def _audience(self, bucket: Bucket) -> list[int]:
        """Return the group ranks of those who get a bucket."""
        if bucket.part not in self._ranks:
            self._ranks[bucket.part] = [
                rank for rank, own in enumerate(self._parts, start=1) if own is None or bucket.part in own
            ]
        return self._ranks[bucket.part]


class _Sender(_End, BucketSender):
    sends = True

    def __init__(
        self,
        transport: BroadcastTransport,
        offer: SyncOffer,
        group: Group,
        store: Store,
        seats: Seats,
    ) -> None:
        super().__init__(transport, offer, group)
        self._store = store
        self._seats = seats

    def send(self, bucket: Bucket, payload: torch.Tensor) -> None:
        if self._offer.bases:
            self._announce(bucket, _WHOLE, payload.device)
        self.move(bucket, payload, "sent")

    def send_delta(self, bucket: Bucket, delta: torch.Tensor) -> None:
        self._announce(bucket, delta.numel(), delta.device)
        self.move(bucket, delta, "sent")

    def _announce(self, bucket: Bucket, length: int, device: torch.device) -> None:
        word = torch.tensor([length], dtype=torch.int64, device=device)
        self.move(bucket, word.view(torch.uint8), "announced")

    def close(self) -> None:
        seats = [(str(member), int(rank)) for member, rank in self._seats]
        forget(self._store, f"{self._offer.sync_id}/here/", seats)


class _Receiver(_End, BucketReceiver):
    picks = True

    def lend(self, num_bytes: int) -> None:
        """Nothing to lend: buckets are staged in the receiver's memory."""

    def receive_delta(self, bucket: Bucket) -> torch.Tensor | None:
        device = self._transport.device
        word = torch.zeros(1, dtype=torch.int64, device=device)
        self.move(bucket, word.view(torch.uint8), "received")
        length = int(word.item())
        if length == _WHOLE:
            return None
        if not 0 <= length < bucket.num_bytes:
            raise TransferError(
                f"broadcast: a delta of {length} bytes is announced for bucket {bucket.index} of {bucket.num_bytes}"
            )
        delta = torch.empty(length, dtype=torch.uint8, device=device)
        self.move(bucket, delta, "received")
        return delta

    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        self.move(bucket, into, "received")

    def close(self) -> None:
        """The group stays for the next sync."""
