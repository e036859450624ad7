"""Queues within one process: for tests, and for a trainer that generates in its own process."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.plan.slices import parts_of
from offbeat_ckptsync.seams import BucketReceiver, BucketSender, Transport
from offbeat_ckptsync.values import Bucket, Seat, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from offbeat_ckptsync.config import SyncConfig

_DEPTH = 2  # buckets in flight to one receiver


_Item = tuple[bool, "torch.Tensor"]
"""Whether it is a delta, and the bytes."""

_Inbox = queue.Queue[_Item]


@dataclass(slots=True)
class _Channel:
    """One sync: a queue for each receiving rank that came."""

    queues: dict[Seat, _Inbox] = field(default_factory=dict[Seat, "_Inbox"])
    changed: threading.Condition = field(default_factory=threading.Condition)
    aborted: threading.Event = field(default_factory=threading.Event)


# Both sides of a sync make their own transport object, so what they share is the process's.
_channels: dict[str, _Channel] = {}
_channels_lock = threading.Lock()


class LoopbackTransport(Transport):
    """Satisfies `Transport` within one process."""

    device = "cpu"
    carries_deltas = True

    def __init__(self, _config: SyncConfig | None = None) -> None:
        """Hold nothing."""

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Open a channel."""
        with _channels_lock:
            _channels[sync_id] = _Channel()
        return {}

    def sender(self, offer: SyncOffer, members: list[str]) -> _Sender:
        """Wait until every rank of every member has come."""
        channel = _channel(offer.sync_id)
        timeout_s = float(offer.endpoint["rendezvous_s"])
        with channel.changed:
            channel.changed.wait_for(
                lambda: channel.aborted.is_set() or not _missing(channel, members), timeout_s
            )
            missing = _missing(channel, members)
        if missing or channel.aborted.is_set():
            cause = "was aborted" if channel.aborted.is_set() else f"waited {timeout_s:g} s"
            raise TransferError(f"loopback: {cause}; missing {', '.join(missing) or 'nobody'}")
        return _Sender(offer, channel)

    def receiver(self, offer: SyncOffer, seat: Seat) -> _Receiver:
        """Take this seat's queue."""
        channel = _channel(offer.sync_id)
        with channel.changed:
            inbox = channel.queues.setdefault(seat, queue.Queue(_DEPTH))
            channel.changed.notify_all()
        return _Receiver(offer, seat, channel, inbox)

    def abort(self, sync_id: str) -> None:
        """Wake everybody who waits in this sync."""
        with _channels_lock:
            channel = _channels.pop(sync_id, None)
        if channel is not None:
            channel.aborted.set()
            with channel.changed:
                channel.changed.notify_all()

    def close(self) -> None:
        """Nothing is held."""


class _Sender(BucketSender):
    def __init__(self, offer: SyncOffer, channel: _Channel) -> None:
        self._offer = offer
        self._channel = channel
        self._queues = dict(channel.queues)
        self._waits_for = ""

    def waits_for(self) -> str:
        return self._waits_for

    def send(self, bucket: Bucket, payload: torch.Tensor) -> None:
        self._put_all(bucket, payload, is_delta=False)

    def send_delta(self, bucket: Bucket, delta: torch.Tensor) -> None:
        self._put_all(bucket, delta, is_delta=True)

    def _put_all(self, bucket: Bucket, payload: torch.Tensor, *, is_delta: bool) -> None:
        for seat, inbox in self._queues.items():
            parts = parts_of(self._offer, seat)
            if parts is not None and bucket.part not in parts:
                continue
            self._waits_for = str(seat)
            copy = (is_delta, payload.clone())
            if not _until(self._offer, self._channel, lambda box=inbox, item=copy: _put(box, item)):
                raise TransferError(f"loopback: {seat} did not take bucket {bucket.index}")
        self._waits_for = ""

    def close(self) -> None:
        with _channels_lock:
            _channels.pop(self._offer.sync_id, None)


class _Receiver(BucketReceiver):
    def __init__(self, offer: SyncOffer, seat: Seat, channel: _Channel, inbox: _Inbox) -> None:
        self._offer = offer
        self._seat = seat
        self._channel = channel
        self._inbox = inbox
        self._next: _Item | None = None  # what has been taken out of the inbox already

    picks = True

    def receive_delta(self, bucket: Bucket) -> torch.Tensor | None:
        item = self._take(bucket)
        if item[0]:
            return item[1]
        self._next = item
        return None

    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        item, self._next = self._next or self._take(bucket), None
        into.copy_(item[1])

    def _take(self, bucket: Bucket) -> _Item:
        taken: list[_Item] = []

        def take() -> bool:
            try:
                taken.append(self._inbox.get(timeout=_TICK_S))
            except queue.Empty:
                return False
            return True

        if not _until(self._offer, self._channel, take):
            raise TransferError(f"loopback: bucket {bucket.index} did not reach {self._seat}")
        return taken[0]

    def close(self) -> None:
        """The queue goes with its channel."""


_TICK_S = 0.02  # how soon a waiting side notices an abort


def _put(inbox: _Inbox, item: _Item) -> bool:
    try:
        inbox.put(item, timeout=_TICK_S)
    except queue.Full:
        return False
    return True


def _until(offer: SyncOffer, channel: _Channel, attempt: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + float(offer.endpoint["timeout_s"])
    while not channel.aborted.is_set() and time.monotonic() < deadline:
        if attempt():
            return True
    return False


def _channel(sync_id: str) -> _Channel:
    with _channels_lock:
        channel = _channels.get(sync_id)
    if channel is None:
        raise TransferError(
            f"loopback: sync {sync_id} is not open in this process; it was aborted, or never opened here"
        )
    return channel


def _missing(channel: _Channel, members: list[str]) -> list[str]:
    here = {(seat.member, seat.rank) for seat in channel.queues}
    ranks = {seat.member: seat.num_ranks for seat in channel.queues}
    return [
        f"rank {rank} of {member}"
        for member in members
        for rank in range(ranks.get(member, 1))
        if (member, rank) not in here
    ]
