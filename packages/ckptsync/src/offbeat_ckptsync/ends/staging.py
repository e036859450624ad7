"""Receiving buckets into one buffer, digesting bucket k while bucket k+1 arrives."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
import torch

from offbeat_ckptsync.ends.buckets import bucket_starts, met_by, oldest_first, tensor_views
from offbeat_ckptsync.ends.digest import digest
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.toolkit.threads import BusyClock, HostPages, SideStream, mark_of, num_movers, use_device

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Generator, Iterable, Iterator
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from offbeat_ckptsync.seams import BucketReceiver, Transport, WeightSink
    from offbeat_ckptsync.values import Bucket, Manifest, RankId, SyncOffer


class Pages:
    """The first `num_bytes` of a mapping."""

    def __init__(self, mapping: mmap.mmap, num_bytes: int) -> None:
        """Look at `mapping`; it lives as long as any array over it."""
        self._mapping = mapping
        self._num_bytes = num_bytes
        self._lent: weakref.ref[NDArray[np.uint8]] | None = None

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes, for a look that nobody needs to know of."""
        return np.frombuffer(self._mapping, dtype=np.uint8, count=self._num_bytes)

    def lend(self) -> NDArray[np.uint8]:
        """Return the bytes; the array lives as long as the storage of any tensor made from it."""
        array = None if self._lent is None else self._lent()
        if array is None:
            array = self.array()
            self._lent = weakref.ref(array)
        return array

    def is_lent(self) -> bool:
        """Say whether what was lent is still in use."""
        return self._lent is not None and self._lent() is not None


class Memory:
    """Bytes on one device; in host memory it is known whether a tensor over them is still in use."""

    def __init__(self, num_bytes: int, device: str) -> None:
        """Take `num_bytes` of zeros on a torch device type such as "cpu"."""
        self.num_bytes = num_bytes
        self.device = device
        self._bytes: Pages | torch.Tensor
        if device == "cpu":
            self._bytes = Pages(HostPages.private(num_bytes), num_bytes)
        else:
            self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def lend(self) -> torch.Tensor:
        """Return all bytes, uint8 [num_bytes], as they were left; ask `is_lent` before writing to them."""
        return torch.from_numpy(self._bytes.lend()) if isinstance(self._bytes, Pages) else self._bytes

    def is_lent(self) -> bool:
        """Say whether a tensor over these bytes lives; of a device's memory nobody knows, and it says no."""
        return isinstance(self._bytes, Pages) and self._bytes.is_lent()


class StagingPool:
    """Staging memory that is not in use, and a copy of what is served, where there is one.

    After a load the memory that was staged in holds such a copy, which joiners may be given. A sink that serves weights from
    where they were staged has no copy beside them; two memories take turns then, and joiners may be given what is served.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._copy: Memory | None = None
        self._plan: tuple[Manifest, tuple[Bucket, ...]] | None = None  # how to read it
        self._others: list[Memory] = []
        # What is served from where it was staged.
        self._served: tuple[Manifest, list[tuple[str, torch.Tensor]]] | None = None

    def take(self) -> Memory | None:
        """Return memory to stage in that nobody looks at, if there is some; the copy is given up for it."""
        self.forget()
        free = [memory for memory in self._others if not memory.is_lent()]
        self._others = [memory for memory in self._others if memory not in free]
        return free[-1] if free else None

    def put_back(self, memory: Memory | None) -> None:
        """Take memory back whose content is not to be read from here; None where it was the transport's."""
        if memory is not None:
            self._others.append(memory)

    def keep(self, memory: Memory | None, manifest: Manifest, buckets: tuple[Bucket, ...]) -> None:
        """Take memory back that holds what is served now; None where it was the transport's."""
        self.forget()
        self._served = None
        self._copy, self._plan = memory, None if memory is None else (manifest, buckets)

    def serve(self, manifest: Manifest, views: list[tuple[str, torch.Tensor]]) -> None:
        """Note that live weights are these views, until something else is kept."""
        self._served = manifest, views

    def forget(self) -> None:
        """Trust the copy no longer; its memory can be staged in."""
        self.put_back(self._copy)
        self._copy = self._plan = None

    def read(self) -> tuple[Manifest, list[tuple[str, torch.Tensor]]] | None:
        """Return the copy as views of its memory, or what is served from where it was staged, or None."""
        if self._plan is None or self._copy is None:
            return self._served
        return self._plan[0], list(tensor_views(*self._plan, self._copy.lend()))


@dataclass(slots=True)
class Staged:
    """What one rank received: its bytes, their digests, and the transport's end that may own the memory."""

    memory: torch.Tensor  # uint8, buckets end to end
    kept: Memory | None  # whose bytes these are, for later syncs; None where they are the transport's
    digests: tuple[str, ...]
    digest_s: float  # in which at least one thread digested, beside the receiving one
    buckets: tuple[Bucket, ...]
    end: BucketReceiver

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank brought to its machine."""
        return self.num_bytes if self.end.wire_bytes is None else self.end.wire_bytes

    def close(self) -> Memory | None:
        """Let go of everything; return the memory if a later sync may receive into it."""
        self.memory = self.memory.new_empty(0)  # first: whoever fills it next looks who else holds it
        self.end.close()
        return self.kept


class Given(Enum):
    """What became of staged memory when a sink was given views of it."""

    ADOPTED = auto()  # it is served from; what the replica writes into its weights later shows in it, and nothing counts that
    COPIED = auto()  # it holds a copy beside the live weights
    SPOILT = auto()  # the sink wrote into it while it copied


def give(
    sink: WeightSink, staged: Staged, tensors: Iterable[tuple[str, torch.Tensor]], version: int
) -> Given:
    """Give `sink` views of what is staged, to keep if it can and they are in host memory."""
    may_stay = staged.memory.device.type == "cpu" and (staged.kept is None or sink.adopts_private)
    if may_stay and sink.adopt(tensors, version):
        return Given.ADOPTED
    written = writes_to(staged.memory)
    sink.load(tensors, version)
    return Given.COPIED if writes_to(staged.memory) == written else Given.SPOILT


def writes_to(memory: torch.Tensor) -> int:
    """Return a number that grows with each write of torch's into `memory` or any view of it."""
    return 0 if memory.is_inference() else memory._version  # noqa: SLF001 -- torch has no public name for it


def stage(
    transport: Transport,
    offer: SyncOffer,
    rank_id: RankId,
    buckets: tuple[Bucket, ...],
    spare: Memory | None = None,
) -> Staged:
    """Receive all buckets, into the transport's own memory where it lends some, else into `spare` or a fresh buffer.

    Call it in a thread of its own: it works on the transport's GPU, in a stream that waits for nobody's generation.
    Bucket k is digested where it lies while bucket k + 1 arrives.

    Raises:
        TransferError: a bucket did not arrive; names rank_id, bucket and cause.
    """
    starts, num_bytes = bucket_starts(buckets)
    clock = BusyClock()
    use_device(transport.device)
    on_gpu = spare is not None and spare.device != "cpu" and spare.num_bytes == num_bytes
    transport.spare_bytes = num_bytes if on_gpu else 0
    end = transport.receiver(*met_by(offer, rank_id))
    try:
        lent = end.lend(num_bytes)
        if lent is None:
            kept = _fitting(spare, num_bytes, transport.device)
            memory = kept.lend()
        else:
            kept, memory = None, lent
        with SideStream(str(memory.device)).after(mark_of(memory)):
            digests = _taken(end, rank_id, memory, buckets, starts, clock)
    except BaseException:
        end.close()
        raise
    return Staged(buckets=buckets, memory=memory, kept=kept, digests=digests, digest_s=clock.seconds, end=end)


def _fitting(spare: Memory | None, num_bytes: int, device: str) -> Memory:
    if spare is not None and (spare.num_bytes, spare.device) == (num_bytes, device):
        return spare
    return Memory(num_bytes, device)


def _taken(
    end: BucketReceiver,
    rank_id: RankId,
    memory: torch.Tensor,
    buckets: tuple[Bucket, ...],
    starts: list[int],
    clock: BusyClock,
) -> tuple[str, ...]:
    """Receive the buckets into `memory`, each at its start, and return their digests."""
    on_host = memory.device.type == "cpu"
    stream = SideStream(str(memory.device))

    def begun() -> Iterator[tuple[Bucket, torch.Tensor, Callable[[], None]]]:
        for bucket, start in zip(buckets, starts, strict=True):
            into = memory[start : start + bucket.num_bytes]
            with _named(rank_id, bucket):
                wait = end.start(bucket, into)
            yield bucket, into, wait

    def digest_of(payload: torch.Tensor, from_sender: str | None) -> str:
        if from_sender is not None:
            return from_sender
        with stream.after(), clock:  # what has arrived has been waited for
            return digest(payload)

    with ThreadPoolExecutor(
        num_movers() if on_host else 1, thread_name_prefix=f"digest for {rank_id}"
    ) as pool:
        digests: list[Future[str]] = []
        for bucket, into, wait in oldest_first(begun(), end.in_flight):
            with _named(rank_id, bucket):
                wait()
            digests.append(pool.submit(digest_of, into, end.told(bucket)))
        return tuple(future.result() for future in digests)


@contextmanager
def _named(rank_id: RankId, bucket: Bucket) -> Generator[None]:
    try:
        yield
    except SyncError:
        raise
    except Exception as error:
        raise TransferError(f"{rank_id}: bucket {bucket.index}: {error!r}") from error
