"""The source side as the manager sees it: offers, sends, aborts."""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

from offbeat_ckptsync.ends.buckets import met_at
from offbeat_ckptsync.ends.buffers import Buffers
from offbeat_ckptsync.ends.pipeline import FIRST, gather_weights, walk
from offbeat_ckptsync.errors import PhaseError
from offbeat_ckptsync.seams import Source, Transport, WeightSource
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.toolkit.threads import in_thread
from offbeat_ckptsync.values import Sent, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator


class Sender:
    """A sending rank of a source, without an event loop: plain blocking calls, for an actor or a training process.

    Mostly rank 0 alone sends. `send` runs the source's collective iteration in the calling thread; ranks that do not send
    call `walk` at the same time, and all with the same `senders`. `abort` may come from any thread while `send` runs.
    """

    def __init__(
        self, source: WeightSource, config: SyncConfig, *, transport: Transport | None = None
    ) -> None:
        """Send what `source` yields by the transport that `config` names, or by the one given."""
        self._source = source
        self.collective = source.collective
        self._config = config
        self._transport = make_transport(config.transport, config) if transport is None else transport
        self._members: dict[str, list[str]] = {}
        self._buffers: Buffers | None = None
        self._sending = threading.Lock()
        self._ends_at = 0.0  # by which time (monotonic) what is sent has left, or has been given up
        self._gathered: dict[str, Callable[[], Sent]] = {}  # by sync, one at most: waits until it has left

    def offer(self, version: int, members: list[str]) -> SyncOffer:
        """Return an offer of the current weights as `version` to `members`; moves no bytes.

        Waits for a `send` that was given up to end, so that its remains take nothing from the time of the next one.

        Raises:
            PhaseError: it has not ended yet.
        """
        sync_id = uuid.uuid4().hex
        endpoint = self.open(sync_id, members)
        return SyncOffer(
            sync_id=sync_id,
            version=version,
            manifest=self._source.manifest(),
            bucket_bytes=self._config.bucket_bytes,
            transport=self._config.transport,
            endpoint=endpoint,
        )

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Prepare to send a sync to `members`, one that another rank may have offered, and return where they meet this one.

        Raises:
            PhaseError: as `offer`.
        """
        self._take_turn()
        self._sending.release()
        endpoint = self._transport.open(sync_id, members)
        self._members = {sync_id: list(members)}
        return endpoint | {
            "timeout_s": self._config.transfer_timeout_s,
            "rendezvous_s": min(self._config.begin_timeout_s, self._config.transfer_timeout_s),
        }

    def walk(self, senders: Collection[int] = FIRST) -> None:
        """Take part in gathering what other ranks, `senders`, send."""
        walk(self._source, senders)

    def gather(self, offer: SyncOffer, senders: Collection[int] = FIRST) -> bool:
        """Copy out what `send` sends, which may then be called in any thread, and return True: the weights may change.

        Raises as `send`. It runs the source's collective iteration in the calling thread, in place of `send`.
        """
        with self._turn(offer):
            self._gather(offer, senders)
        return True

    def send(self, offer: SyncOffer, senders: Collection[int] = FIRST) -> Sent:
        """Send every bucket to every member, gathered by `gather` or here; see `gather_weights` for what it raises.

        Raises:
            PhaseError: the offer is not this source's latest, or another `send` has not ended yet.
        """
        with self._turn(offer):
            if offer.sync_id not in self._gathered:
                self._gather(offer, senders)
            return _explained(self._gathered.pop(offer.sync_id)(), self._transport)

    @contextmanager
    def _turn(self, offer: SyncOffer) -> Generator[None]:
        """Work for `offer` in the block, alone; a failure in it gives the sync up."""
        self._take_turn()
        self._ends_at = time.monotonic() + self._config.transfer_timeout_s
        try:
            yield
        except BaseException:
            self._transport.abort(offer.sync_id)
            raise
        finally:
            self._sending.release()

    def _gather(self, offer: SyncOffer, senders: Collection[int]) -> None:
        members = self._members.get(offer.sync_id)
        if members is None:
            self.walk(senders)  # the other ranks do, they know nothing of an abort
            raise PhaseError(f"sync {offer.sync_id} is not open at this source; offer again")
        met = met_at(offer, offer.endpoints[members[0]]) if offer.endpoints else offer
        left = gather_weights(
            self._source,
            met,
            lambda: self._transport.sender(met, members),
            buffers=self._own_buffers,
            lend=lambda num_bytes: self._transport.lend(met, num_bytes),
            senders=senders,
        )
        self._gathered = {offer.sync_id: left}

    def abort(self, sync_id: str) -> None:
        """Give up a sync; a running `send` of it ends with an error after the source is iterated to its end."""
        if self._members.pop(sync_id, None) is not None:
            self._transport.abort(sync_id)

    def trim(self) -> None:
        """Let go of memory that is kept for the next sync, unless one is being sent."""
        if self._sending.acquire(blocking=False):
            self._buffers = None
            self._transport.trim()
            self._sending.release()

    def close(self) -> None:
        """Leave all connections."""
        self._transport.close()

    def _own_buffers(self) -> Buffers:
        """Return the buffers on the transport's device, which may be another one in each sync."""
        if self._buffers is None or self._buffers.device != self._transport.device:
            self._buffers = Buffers(self._transport.device)
        return self._buffers

    def _take_turn(self) -> None:
        # The manager waits for longer, and is to hear why: one that was given up is still gathered to its end.
        limit_s = self._config.begin_timeout_s / 2 + max(self._ends_at - time.monotonic(), 0.0)
        if not self._sending.acquire(timeout=limit_s):
            raise PhaseError(f"the source still sends another sync after {limit_s:g} s; abort that one first")


def _explained(sent: Sent, transport: Transport) -> Sent:
    name, why = transport.chosen
    return dataclasses.replace(sent, transport=name, why=why)


class LocalSource(Source):
    """A `Sender` of this process; blocking calls run in threads of their own."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.collective = sender.collective
        self._num_asked = 0
        self._offering = threading.Lock()

    async def offer(self, version: int, members: list[str]) -> SyncOffer:
        """Prepare to send the current weights as `version` to these members."""
        self._num_asked += 1
        number = self._num_asked

        def work() -> SyncOffer:
            with (
                self._offering
            ):  # one that nobody waits for any more must not open its sync in the place of a later one's
                if number != self._num_asked:
                    raise PhaseError(f"version {version} was to be offered, and another one meanwhile")
                return self._sender.offer(version, members)

        return await in_thread(work, name=f"offer {version}")

    async def gather(self, offer: SyncOffer) -> bool:
        """See `Source.gather`."""
        return await in_thread(lambda: self._sender.gather(offer), name=f"gather {offer.version}")

    async def send(self, offer: SyncOffer) -> Sent:
        """Send every bucket to every member."""
        return await in_thread(lambda: self._sender.send(offer), name=f"send {offer.version}")

    async def trim(self) -> None:
        """Let go of memory that is kept for the next sync."""
        await in_thread(self._sender.trim, name="trim")

    async def abort(self, sync_id: str) -> None:
        """Give up a sync; safe at any moment."""
        await in_thread(lambda: self._sender.abort(sync_id), name="abort send")
