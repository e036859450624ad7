"""Queues within one process: for tests, and for a trainer that generates in its own process."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from offbeat_ckptsync.ends.buckets import missing_ranks
from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.seams import BucketReceiver, BucketSender, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_ckptsync.values import Bucket, RankId, SyncOffer


_DEPTH = 2  # buckets in flight to one receiver


class _Channel:
    """One sync: a queue for each receiving rank that came."""

    def __init__(self) -> None:
        self.queues: dict[RankId, deque[torch.Tensor]] = {}
        self.changed = threading.Condition()
        self.is_aborted = False

    def until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait, holding `changed`, and say whether it is `ready`, and not aborted."""
        self.changed.wait_for(lambda: self.is_aborted or ready(), timeout_s)
        return ready() and not self.is_aborted


# Both sides of a sync make their own transport object, so what they share is the process's.
_channels: dict[str, _Channel] = {}
_channels_lock = threading.Lock()


class LoopbackTransport(Transport):
    """Satisfies `Transport` within one process."""

    device = "cpu"

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
            if not channel.until(lambda: not missing_ranks(channel.queues, members), timeout_s):
                missing = ", ".join(missing_ranks(channel.queues, members)) or "nobody"
                cause = "was aborted" if channel.is_aborted else f"waited {timeout_s:g} s"
                raise TransferError(f"loopback: {cause}; missing {missing}")
            return _Sender(offer, channel)

    def receiver(self, offer: SyncOffer, rank_id: RankId) -> _Receiver:
        """Take this rank_id's queue."""
        channel = _channel(offer.sync_id)
        with channel.changed:
            inbox = channel.queues.setdefault(rank_id, deque())
            channel.changed.notify_all()
        return _Receiver(offer, rank_id, channel, inbox)

    def abort(self, sync_id: str) -> None:
        """Wake everybody who waits in this sync."""
        with _channels_lock:
            channel = _channels.pop(sync_id, None)
        if channel is not None:
            with channel.changed:
                channel.is_aborted = True
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
        timeout_s = float(self._offer.endpoint["timeout_s"])
        for rank_id, inbox in self._queues.items():
            self._waits_for = str(rank_id)
            copy = payload.clone()
            with self._channel.changed:
                if not self._channel.until(lambda box=inbox: len(box) < _DEPTH, timeout_s):
                    raise TransferError(f"loopback: {rank_id} did not take bucket {bucket.index}")
                inbox.append(copy)
                self._channel.changed.notify_all()
        self._waits_for = ""

    def close(self) -> None:
        with _channels_lock:
            _channels.pop(self._offer.sync_id, None)


class _Receiver(BucketReceiver):
    def __init__(
        self, offer: SyncOffer, rank_id: RankId, channel: _Channel, inbox: deque[torch.Tensor]
    ) -> None:
        self._offer = offer
        self._rank_id = rank_id
        self._channel = channel
        self._inbox = inbox

    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        timeout_s = float(self._offer.endpoint["timeout_s"])
        with self._channel.changed:
            if not self._channel.until(lambda: bool(self._inbox), timeout_s):
                raise TransferError(f"loopback: bucket {bucket.index} did not reach {self._rank_id}")
            payload = self._inbox.popleft()
            self._channel.changed.notify_all()
        into.copy_(payload)

    def close(self) -> None:
        """The queue goes with its channel."""


def _channel(sync_id: str) -> _Channel:
    with _channels_lock:
        channel = _channels.get(sync_id)
    if channel is None:
        raise TransferError(
            f"loopback: sync {sync_id} is not open in this process; it was aborted, or never opened here"
        )
    return channel
