"""Shared memory on one machine: packed once by the source, read in place by every receiving rank.

The source packs buckets end to end into an anonymous segment and tells each rank over its line (`line`)
when one is whole. A rank maps the segment once, and its engine loads from there, or serves from there where its sink adopts the
tensors as they lie (`WeightSink.adopt`): then all receivers of a machine serve from the same memory.

Each bucket is digested where it lies by one of the ranks, in turn. The others are told the source's digest and echo
that, once the kernel has said that the pages they map are those very pages. So all see what one has digested, and none of them
changes over where its digest differs from the source's.

A rank's connection is its lease on what it staged: it stays open for as long as any tensor over the segment lives, and
the kernel closes it when the rank dies. The source writes to a segment only when it has no lease left, and takes
another one otherwise, as long as its members hold fewer than three versions. So nothing staged is overwritten, and what was verified is what is loaded.

A segment is a file without a name (memfd) that travels as an open file and vanishes with its last holder: nothing has to be
unlinked, whoever dies when, and nobody who is not handed the file can open it. Its size is sealed, so that no receiver can be made to fault.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
import uuid
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from offbeat_ckptsync.ends.buckets import bucket_starts, buckets_of
from offbeat_ckptsync.ends.staging import Pages
from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.seams import BucketReceiver, BucketSender
from offbeat_ckptsync.toolkit.threads import HostPages
from offbeat_ckptsync.transports.line import Guest, Line, LineTransport, call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_ckptsync.transports.line import Line
    from offbeat_ckptsync.values import Bucket, RankId, SyncOffer


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: fault pages in, or say that there are none
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Lease(NamedTuple):
    """A receiving rank's claim on what is in a segment, for as long as its line is open."""

    line: Line
    rank_id: RankId
    version: int


class Segment:
    """The source's side: memory that it may write while nobody holds a lease on it."""

    def __init__(self, num_bytes: int) -> None:
        """Make a segment of `num_bytes`, with all its pages.

        Raises:
            TransferError: there is not that much memory.
        """
        self.id = uuid.uuid4().hex
        self.num_bytes = num_bytes
        self.leases: list[Lease] = []
        self.fd = os.memfd_create("offbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = max(num_bytes, mmap.PAGESIZE)
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            pages = HostPages(self.fd, size)
            _fill(self.fd, pages, size)
            pages.pin()
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise TransferError(
                f"shm: no shared memory for {num_bytes} bytes: {error}; free some, or choose another transport"
            ) from error
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]

    def is_free(self) -> bool:
        """Say whether nobody holds what is in it."""
        still = [lease for lease in self.leases if lease.line.is_open()]
        for lease in self.leases:
            if lease not in still:
                lease.line.close()
        self.leases = still
        return not still

    def close(self) -> None:
        """Let go of it; receivers that hold it keep it."""
        for lease in self.leases:
            lease.line.close()
        self.leases = []
        self.memory = self.memory.new_empty(0)
        fd, self.fd = self.fd, -1  # another file may get the number, and must not be sent for this one
        os.close(fd)


class Mapping:
    """A receiver's view of a segment, kept from sync to sync: page tables cost more than half a copy.

    It is private: a loader that writes into the tensors it is given changes nothing for others. Pages it wrote no
    longer follow the source, so a mapping that was written to is used once only (`written`, `is_spoilt`). For the same
    reason it is not pinned: that would write to all of them.
    """

    def __init__(self, segment_id: str, fd: int, num_bytes: int) -> None:
        """Map the open file `fd`, which is closed here.

        Raises:
            TransferError: it is too small, or its size is not sealed.
        """
        self.id = segment_id
        try:
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
            if seals & fcntl.F_SEAL_SHRINK == 0 or size < num_bytes:
                raise TransferError(
                    f"shm: a segment of {size} bytes with seals {seals:#x} for {num_bytes} bytes; not taken"
                )
            self._pages = Pages(mmap.mmap(fd, size, access=mmap.ACCESS_COPY), num_bytes)
        finally:
            os.close(fd)
        self._base: torch.Tensor | None = None
        self._version = 0
        self._was_kept = False  # tensors over it outlived the sync that staged them

    def lend(self, lease: Line) -> torch.Tensor:
        """Return the bytes, uint8; `lease` is closed when the last tensor over them is gone."""
        array = self._pages.lend()
        weakref.finalize(array, lease.close)
        self._base = torch.from_numpy(array)
        self._version = self._base._version  # noqa: SLF001 -- torch has no public name for it
        return self._base

    def view(self) -> torch.Tensor:
        """Return the bytes, uint8, for copying out at once: no lease guards them."""
        return torch.from_numpy(self._pages.array())

    def written(self) -> bool:
        """Forget the tensor lent last; say whether anybody wrote into it, or into a view of it."""
        base, self._base = self._base, None
        written = base is not None and base._version != self._version  # noqa: SLF001 -- as above
        del base
        self._was_kept |= self._pages.is_lent()
        return written

    def is_spoilt(self) -> bool:
        """Say whether somebody who kept tensors over it, and has let go of them since, wrote into them.

        Torch does not count what is written through a parameter that was pointed here, so the kernel is asked.
        """
        if not self._was_kept or self._pages.is_lent():
            return False  # what is still in use is looked at when it is wanted again
        self._was_kept = False
        return _has_own_pages(self._pages.array())

    def is_shared(self, start: int, end: int) -> bool:
        """Say whether these bytes are those that all who map the segment see: none of their pages was written to here."""
        return not _has_own_pages(self._pages.array()[start:end])


def _has_own_pages(array: NDArray[np.uint8]) -> bool:
    """Say whether any page of a private mapping was copied for this process, which is what writing to it does.

    The kernel's word for each page is in /proc/self/pagemap (docs.kernel.org/admin-guide/mm/pagemap.html): bit 63 or 62
    where there is one, in memory or swapped out, bit 61 where it is still the file's. Where that cannot be read, yes.
    """
    first = array.ctypes.data // mmap.PAGESIZE
    num_pages = -(-(array.ctypes.data + len(array)) // mmap.PAGESIZE) - first
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * first)
            words = np.frombuffer(file.read(8 * num_pages), dtype=np.uint64)
    except OSError:
        return True
    there, of_file = words >> np.uint64(62) != 0, words >> np.uint64(61) & np.uint64(1) != 0
    return len(words) < num_pages or bool((there & ~of_file).any())


def _fill(fd: int, pages: mmap.mmap, size: int) -> None:
    """Get all pages now: a page that is missing later ends the process with SIGBUS."""
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)  # where the kernel has them for shared memory
    try:
        pages.madvise(_POPULATE_WRITE)
    except OSError as error:
        if error.errno != 22:  # EINVAL: a kernel before 5.14
            raise
        os.posix_fallocate(fd, 0, size)


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
                held = ", ".join(sorted({f"{lease.rank_id} (version {lease.version})" for lease in leases}))
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
                if not members or lease.rank_id.member in members
            }
            if chosen is None and len(held) < MAX_VERSIONS:
                chosen = Segment(num_bytes)
                self._segments.append(chosen)
            return chosen

    def sender(
        self, offer: SyncOffer, members: list[str], rank_ids: Sequence[tuple[str, int]] = ()
    ) -> _Sender:
        """Wait for the calls of all ranks of `members`, and of `rank_ids`, and hand them the segment."""
        if offer.sync_id not in self._open:
            self.lend(offer, bucket_starts(buckets_of(offer))[1])
        segment = self._open[offer.sync_id]
        guests = self.meet(offer, members, rank_ids)
        with self._lock:
            # Before they see the segment: from here on it is theirs until they close.
            segment.leases += [Lease(guest.line, guest.rank_id, offer.version) for guest in guests]
            self._lines = {offer.sync_id: [guest.line for guest in guests]}
        return _Sender(offer, segment, guests, [each.id for each in self._segments])

    def receiver(self, offer: SyncOffer, rank_id: RankId) -> _Receiver:
        """Call the source and map its segment, unless it is mapped already."""
        stop = lambda: self.is_aborted(offer.sync_id)  # noqa: E731
        self._maps = {name: mapping for name, mapping in self._maps.items() if not mapping.is_spoilt()}
        line, welcome, fd = call(offer, rank_id, {"has": [*self._maps]}, stop)
        try:
            self._maps = {name: mapping for name, mapping in self._maps.items() if name in welcome["keep"]}
            name = str(welcome["welcome"])
            if fd is not None:
                self._maps[name] = Mapping(name, fd, int(welcome["num_bytes"]))
            mapping = self._maps[name]
        except BaseException:
            line.close()
            raise
        return _Receiver(self, offer, rank_id, line, mapping)

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
            self._waits_for = str(guest.rank_id)
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
        self, transport: ShmTransport, offer: SyncOffer, rank_id: RankId, line: Line, mapping: Mapping
    ) -> None:
        self._transport = transport
        self._offer = offer
        self._who = str(rank_id)
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
