"""One process group from the source to every receiving rank: gloo for host memory, NCCL for GPUs.

The group is private (beside any default group) and is kept while the membership stays the same: every sync begins with a roll call at
a store of the source (`rendezvous`), and where all are in the source's group that one is used; else all build another. A failure on
any side drops its group, so the next sync builds a fresh one. What travels in the group is neither signed nor encrypted: gloo and
NCCL want a network in which nobody is a stranger. docs/sync-protocol.md, section 7, has the words.
"""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.seams import BucketReceiver, BucketSender, Transport
from offbeat_ckptsync.store import Store, own_address
from offbeat_ckptsync.threads import own_device
from offbeat_ckptsync.transports.group import Group, Seats
from offbeat_ckptsync.transports.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import torch

    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.values import Bucket, Seat, SyncOffer


class BroadcastTransport(Transport):
    """Satisfies `Transport` over a process group; rank 0 is the source."""

    def __init__(self, config: SyncConfig) -> None:
        """Listen, as a source, on `config.host`; payloads live on `config.device`."""
        self.device = own_device(config.device)
        self._lock = threading.Lock()
        self.rendezvous = Rendezvous("broadcast", config, asked="here", told="go")
        self._group: Group | None = None

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Host the store (once) and say where it is."""
        group = self._group
        return self.rendezvous.open(keep="" if group is None else f"{group.prefix}/")

    def sender(self, offer: SyncOffer, members: list[str]) -> _Sender:
        """Call the roll and build or reuse the group."""
        roll = self.rendezvous.call_roll(offer, members)
        seats: Seats = [[member, rank] for member, words in roll.items() for rank in range(len(words))]
        group = self._group
        together = all(
            here["group"] == (group.id if group else "") for ranks in roll.values() for here in ranks
        )
        if group is None or group.seats != seats or not together:
            group = self._new_group(uuid.uuid4().hex, seats)
            self._drop()
        self.rendezvous.tell(offer, {"group": group.id, "seats": seats})
        self._join_group(group, self.rendezvous.store, offer, rank=0)
        return _Sender(self, offer, group)

    def receiver(self, offer: SyncOffer, seat: Seat) -> _Receiver:
        """Answer the roll call and build or reuse the group."""
        self.rendezvous.answer(offer, seat, {"group": self._group.id if self._group else ""})
        told = self.rendezvous.hear(offer, seat)
        group = self._group
        if group is None or group.id != told["group"]:
            self._drop()
            group = self._new_group(told["group"], told["seats"])
            rank = 1 + told["seats"].index([seat.member, seat.rank])
            self._join_group(group, self.rendezvous.source_store(offer, seat), offer, rank=rank)
        return _Receiver(self, offer, group)

    def abort(self, sync_id: str) -> None:
        """End the waits of `sync_id` here and drop the group: what hangs in it is left to its deadline."""
        self.rendezvous.abort(sync_id)
        self._drop()

    def close(self) -> None:
        """Leave the group and the stores."""
        self._drop()
        self.rendezvous.close()

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

    def _new_group(self, group_id: str, seats: Seats) -> Group:
        return Group(group_id, seats, prefix=self.rendezvous.private(group_id))

    def _join_group(self, group: Group, store: Store, offer: SyncOffer, *, rank: int) -> None:
        if self._group is group:
            return
        # Peers reach a rank at the address from which it reaches the source; what a host is called may lead elsewhere.
        host = own_address(store.host, store.port)
        with self._lock:  # before it is built: an abort ends that, too, or the next sync would wait for it
            if self.rendezvous.is_aborted(offer.sync_id):
                raise TransferError("broadcast: aborted before the group formed")
            self._group = group
        try:
            group.build(store, rank, host, self.device, float(offer.endpoint["rendezvous_s"]))
        except BaseException:
            self.failed(group)
            raise


class _End:
    in_flight = 2  # the wire is not idle while the next one is taken up

    def __init__(self, transport: BroadcastTransport, offer: SyncOffer, group: Group) -> None:
        self._transport = transport
        self._offer = offer
        self._group = group
        self._deadline = time.monotonic() + float(offer.endpoint["timeout_s"])

    def begin(self, bucket: Bucket, payload: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to move a bucket's bytes; return a call that waits for them."""
        if self._transport.rendezvous.is_aborted(self._offer.sync_id):
            raise TransferError(f"broadcast: aborted before bucket {bucket.index}")
        left_s = self._deadline - time.monotonic()
        with self._explained(bucket, what):
            end = self._group.start(payload, left_s)

        def wait() -> None:
            with self._explained(bucket, what):
                end()

        return wait

    @contextmanager
    def _explained(self, bucket: Bucket, what: str) -> Generator[None]:
        try:
            yield
        except (RuntimeError, TransferError) as error:  # TransferError: too late, or left by `abort`
            self._transport.failed(self._group)
            raise TransferError(
                f"broadcast: bucket {bucket.index} of version {self._offer.version} could not be {what}: {error}"
            ) from error


class _Sender(_End, BucketSender):
    def send(self, bucket: Bucket, payload: torch.Tensor) -> None:
        self.start(bucket, payload)()

    def start(self, bucket: Bucket, payload: torch.Tensor) -> Callable[[], None]:
        return self.begin(bucket, payload, "sent")

    def waits_for(self) -> str:
        return ", ".join(f"rank {rank} of {member}" for member, rank in self._group.seats)

    def close(self) -> None:
        """The group stays for the next sync."""


class _Receiver(_End, BucketReceiver):
    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        self.start(bucket, into)()

    def start(self, bucket: Bucket, into: torch.Tensor) -> Callable[[], None]:
        return self.begin(bucket, into, "received")

    def close(self) -> None:
        """The group stays for the next sync."""
