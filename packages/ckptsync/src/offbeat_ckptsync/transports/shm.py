"""Shared memory on one machine: packed once by the source, read in place by every receiving rank.

The source packs buckets end to end into an anonymous segment (`segments`) and tells each rank over its line (`line`)
when one is whole. A rank maps the segment once, and its engine loads from there, or serves from there where its sink adopts the
tensors as they lie (`WeightSink.adopt`): then all receivers of a machine serve from the same memory.

Each bucket is digested where it lies by one of the ranks, in turn. The others are told the source's digest and echo
that, once the kernel has said that the pages they map are those very pages. So all see what one has digested, and none of them
changes over where its digest differs from the source's.

A rank's connection is its lease on what it staged: it stays open for as long as any tensor over the segment lives, and
the kernel closes it when the rank dies. The source writes to a segment only when it has no lease left, and takes
another one otherwise, as long as its members hold fewer than three versions. So nothing staged is overwritten, and what was verified is what is loaded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.plan.buckets import bucket_starts, buckets_of
from offbeat_ckptsync.seams import BucketReceiver, BucketSender
from offbeat_ckptsync.transports.line import Guest, Line, LineTransport, call
from offbeat_ckptsync.transports.segments import Lease, Mapping, Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.values import Bucket, Seat, SyncOffer


MAX_VERSIONS = 3
"""How many versions the members of a sync may hold when another segment is made, each as large as the weights.

Members that caught up one by one hold a version in a segment each; who was fenced off counts for nothing."""

_TICK_S = 0.02


class ShmTransport(LineTransport):
    """Satisfies `Transport` between processes of one machine and user (and within one process)."""

    device = "cpu"

    def __init__(self, config: SyncConfig | None = None) -> None:
        """Hold nothing yet."""
        super().__init__(config)
        self._segments: list[Segment] = []
        self._open: dict[str, Segment] = {}  # by sync
        self._members: dict[str, list[str]] = {}
        self._maps: dict[str, Mapping] = {}

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Listen (once) and say where."""
        self._members = {sync_id: members}
        return super().open(sync_id, members)

    def lend(self, offer: SyncOffer, num_bytes: int) -> torch.Tensor:
        """Return a segment that nobody holds; makes one where there is none and members hold fewer than `MAX_VERSIONS`.

        Raises:
            TransferError: they hold so many, and none was let go of within `rendezvous_s`; names who holds them.
        """
        members = self._members.get(offer.sync_id, [])
        deadline = time.monotonic() + float(offer.endpoint["rendezvous_s"])
        while (chosen := self._free_segment(num_bytes, members)) is None:
            if self.is_aborted(offer.sync_id) or time.monotonic() > deadline:
                leases = (lease for each in self._segments for lease in each.leases)
                held = ", ".join(sorted({f"{lease.seat} (version {lease.version})" for lease in leases}))
                raise TransferError(
                    f"shm: {MAX_VERSIONS} versions of {num_bytes} bytes are still held, by {held}; who keeps tensors of a "
                    "version must let go of them, or be started anew"
                )
            time.sleep(_TICK_S)
        self._open = {offer.sync_id: chosen}
        return chosen.memory

    def _free_segment(self, num_bytes: int, members: list[str]) -> Segment | None:
        with self._lock:
            free = [segment for segment in self._segments if segment.is_free()]
            chosen = next((segment for segment in free if segment.num_bytes == num_bytes), None)
            for segment in free:
                if segment is not chosen:
                    self._segments.remove(segment)
                    segment.close()
            held = {
                lease.version
                for segment in self._segments
                for lease in segment.leases
                if not members or lease.seat.member in members
            }
            if chosen is None and len(held) < MAX_VERSIONS:
                chosen = Segment(num_bytes)
                self._segments.append(chosen)
            return chosen

    def sender(self, offer: SyncOffer, members: list[str], seats: Sequence[tuple[str, int]] = ()) -> _Sender:
        """Wait for the calls of all ranks of `members`, and of `seats`, and hand them the segment."""
        if offer.sync_id not in self._open:
            self.lend(offer, bucket_starts(buckets_of(offer))[1])
        segment = self._open[offer.sync_id]
        guests = self.meet(offer, members, seats)
        with self._lock:
            # Before they see the segment: from here on it is theirs until they close.
            segment.leases += [Lease(guest.line, guest.seat, offer.version) for guest in guests]
            self._lines = {offer.sync_id: [guest.line for guest in guests]}
        return _Sender(offer, segment, guests, [each.id for each in self._segments])

    def receiver(self, offer: SyncOffer, seat: Seat) -> _Receiver:
        """Call the source and map its segment, unless it is mapped already."""
        stop = lambda: self.is_aborted(offer.sync_id)  # noqa: E731
        self._maps = {name: mapping for name, mapping in self._maps.items() if not mapping.is_spoilt()}
        line, welcome, fd = call(offer, seat, {"has": [*self._maps]}, stop)
        try:
            self._maps = {name: mapping for name, mapping in self._maps.items() if name in welcome["keep"]}
            name = str(welcome["welcome"])
            if fd is not None:
                self._maps[name] = Mapping(name, fd, int(welcome["num_bytes"]))
            mapping = self._maps[name]
        except BaseException:
            line.close()
            raise
        return _Receiver(self, offer, seat, line, mapping)

    def discard(self, sync_id: str) -> None:
        """Use this sync's segment no more: somebody may still write to it."""
        with self._lock:
            segment = self._open.pop(sync_id, None)
            if segment is not None:
                self._segments.remove(segment)
                segment.close()

    def trim(self) -> None:
        """Give back segments that nobody holds."""
        with self._lock:
            for segment in [each for each in self._segments if each.is_free()]:
                self._segments.remove(segment)
                segment.close()
            self._open = {}

    def close(self) -> None:
        """Let go of segments, mappings and the address."""
        with self._lock:
            for segment in self._segments:
                segment.close()
            self._segments, self._open, self._maps = [], {}, {}
        super().close()

    def forget(self, mapping: Mapping) -> None:
        """Map this segment anew the next time."""
        if self._maps.get(mapping.id) is mapping:
            del self._maps[mapping.id]


class _Sender(BucketSender):
    def __init__(self, offer: SyncOffer, segment: Segment, guests: list[Guest], keep: list[str]) -> None:
        self._offer = offer
        self._segment = segment
        self._guests = guests
        self._deadline = time.monotonic() + float(offer.endpoint["timeout_s"])
        buckets = buckets_of(offer)
        self._starts, _ = bucket_starts(buckets)
        self._vouched = ""
        self._waits_for = ""
        for guest in guests:
            welcome = {"welcome": segment.id, "num_bytes": segment.num_bytes, "keep": keep}
            mapped = segment.id in guest.hello["has"]
            guest.say(welcome, self._deadline, self._what("the welcome"), None if mapped else segment.fd)

    def send(self, bucket: Bucket, payload: torch.Tensor, taken: str = "") -> None:
        """Say that a bucket is there; `taken` is its digest, where no receiver need take it again."""
        start = self._starts[bucket.index]
        place = self._segment.memory[start : start + bucket.num_bytes]
        if place.data_ptr() != payload.data_ptr():
            place.copy_(payload)
        vouched, self._vouched = self._vouched, ""
        prover = self._guests[bucket.index % len(self._guests)] if self._guests else None
        for guest in self._guests:
            self._waits_for = str(guest.seat)
            said = {"bucket": bucket.index, "digest": taken or ("" if guest is prover else vouched)}
            guest.say(said, self._deadline, self._what(f"bucket {bucket.index}"))
        self._waits_for = ""

    def vouch(self, bucket: Bucket, digest: str) -> None:
        self._vouched = digest

    def waits_for(self) -> str:
        return self._waits_for

    def close(self) -> None:
        """The lines stay open: they are the receivers' leases."""

    def _what(self, what: str) -> str:
        return f"shm: {what} of version {self._offer.version}"


class _Receiver(BucketReceiver):
    def __init__(
        self, transport: ShmTransport, offer: SyncOffer, seat: Seat, line: Line, mapping: Mapping
    ) -> None:
        self._transport = transport
        self._offer = offer
        self._who = str(seat)
        self._line = line
        self._mapping = mapping
        self._num_whole = 0  # buckets that are whole
        self._told: list[str] = []  # their digests, where another rank takes them
        self._buckets = buckets_of(offer)
        self._starts, _ = bucket_starts(self._buckets)
        self._memory: torch.Tensor | None = None
        self._deadline = time.monotonic() + float(offer.endpoint["timeout_s"])

    def lend(self, num_bytes: int) -> torch.Tensor:
        self._memory = self._mapping.lend(self._line)
        return self._memory

    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        what = f"shm: {self._who} waits for bucket {bucket.index} of version {self._offer.version}"
        while self._num_whole <= bucket.index:
            packet, _ = self._line.receive(
                self._deadline, lambda: self._transport.is_aborted(self._offer.sync_id), what
            )
            if packet.get("bucket") != self._num_whole:
                raise TransferError(f"{what}: the source says {packet}, expected bucket {self._num_whole}")
            self._told.append(str(packet["digest"]))
            self._num_whole += 1
        if self._memory is None:  # nobody asked for the segment itself
            start = self._starts[bucket.index]
            into.copy_(self._mapping.view()[start : start + bucket.num_bytes])

    @property
    def wire_bytes(self) -> int:
        return 0  # it is there already

    def told(self, bucket: Bucket) -> str | None:
        told, start = self._told[bucket.index], self._starts[bucket.index]
        if not told or self._memory is None:  # it is for this rank to take
            return None
        # The kernel's word for every page takes a tenth of what digesting them does.
        return told if self._mapping.is_shared(start, start + bucket.num_bytes) else None

    def close(self) -> None:
        was_lent, self._memory = self._memory is not None, None
        if not was_lent or self._num_whole < len(self._buckets):
            self._line.close()  # nobody will look at half a sync
        if self._mapping.written() or self._num_whole < len(self._buckets):
            self._transport.forget(self._mapping)
