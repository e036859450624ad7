"""Receiving buckets into one buffer, digesting bucket k while bucket k+1 arrives."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.member.memory import Memory
from offbeat_ckptsync.plan.buckets import bucket_starts
from offbeat_ckptsync.plan.digest import digest
from offbeat_ckptsync.plan.seats import met_by
from offbeat_ckptsync.threads import BusyClock, SideStream, mark_of, num_movers, use_device

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from concurrent.futures import Future

    import torch

    from offbeat_ckptsync.seams import BucketReceiver, Transport, WeightSink
    from offbeat_ckptsync.values import Bucket, Seat, SyncOffer

    _Arrival = Callable[[], torch.Tensor]
    """Waits for a bucket that is under way, and returns its bytes."""


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
    seat: Seat,
    buckets: tuple[Bucket, ...],
    spare: Memory | None = None,
) -> Staged:
    """Receive all buckets, into the transport's own memory where it lends some, else into `spare` or a fresh buffer.

    Call it in a thread of its own: it works on the transport's GPU, in a stream that waits for nobody's generation.
    Bucket k is digested where it lies while bucket k + 1 arrives.

    Raises:
        TransferError: a bucket did not arrive; names seat, bucket and cause.
    """
    starts, num_bytes = bucket_starts(buckets)
    clock = BusyClock()
    use_device(transport.device)
    on_gpu = spare is not None and spare.device != "cpu" and spare.num_bytes == num_bytes
    transport.spare_bytes = num_bytes if on_gpu else 0
    end = transport.receiver(*met_by(offer, seat))
    try:
        lent = end.lend(num_bytes)
        if lent is None:
            kept = _fitting(spare, num_bytes, transport.device)
            memory = kept.lend()
        else:
            kept, memory = None, lent
        intake = _Intake(seat, memory)
        with SideStream(str(memory.device)).after(mark_of(memory)):
            digests = intake.take(end, buckets, starts, clock)
    except BaseException:
        end.close()
        raise
    return Staged(buckets=buckets, memory=memory, kept=kept, digests=digests, digest_s=clock.seconds, end=end)


def _fitting(spare: Memory | None, num_bytes: int, device: str) -> Memory:
    if spare is not None and (spare.num_bytes, spare.device) == (num_bytes, device):
        return spare
    return Memory(num_bytes, device)


class _Intake:
    """Where one rank puts buckets as they come."""

    def __init__(self, seat: Seat, memory: torch.Tensor) -> None:
        self._who = str(seat)
        self._memory = memory

    def take(
        self, end: BucketReceiver, buckets: tuple[Bucket, ...], starts: list[int], clock: BusyClock
    ) -> tuple[str, ...]:
        """Receive the buckets, each at its start, and return their digests."""
        on_host = self._memory.device.type == "cpu"
        stream = SideStream(str(self._memory.device))

        def proof(payload: torch.Tensor, told: str | None) -> str:
            if told is not None:
                return told  # by who put it there
            with stream.after(), clock:  # what has arrived has been waited for
                return digest(payload)

        with ThreadPoolExecutor(
            num_movers() if on_host else 1, thread_name_prefix=f"digest for {self._who}"
        ) as pool:
            digests: list[Future[str]] = []
            flying: deque[tuple[Bucket, _Arrival]] = deque()

            def land() -> None:
                bucket, arrival = flying.popleft()
                digests.append(pool.submit(proof, arrival(), end.told(bucket)))

            for bucket, start in zip(buckets, starts, strict=True):
                flying.append((bucket, self.begin(end, bucket, start)))
                while len(flying) >= max(end.in_flight, 1):
                    land()
            while flying:
                land()
            return tuple(future.result() for future in digests)

    def begin(self, end: BucketReceiver, bucket: Bucket, start: int) -> _Arrival:
        """Begin to receive a bucket."""
        into = self._memory[start : start + bucket.num_bytes]
        with self._named(bucket):
            wait = end.start(bucket, into)

        def arrival() -> torch.Tensor:
            with self._named(bucket):
                wait()
            return into

        return arrival

    @contextmanager
    def _named(self, bucket: Bucket) -> Generator[None]:
        try:
            yield
        except SyncError:
            raise
        except Exception as error:
            raise TransferError(f"{self._who}: bucket {bucket.index}: {error!r}") from error
