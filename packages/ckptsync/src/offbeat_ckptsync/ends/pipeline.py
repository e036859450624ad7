"""The sending side of one sync: gather and pack bucket k + 1 while bucket k is digested and sent."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from offbeat_ckptsync.ends.buckets import bucket_starts, buckets_of, bytes_of, oldest_first
from offbeat_ckptsync.ends.buffers import BucketBuilder, Buffers
from offbeat_ckptsync.ends.manifest import dtype_name
from offbeat_ckptsync.errors import ManifestError, SyncError, TransferError
from offbeat_ckptsync.toolkit.threads import BusyClock, SideStream, mark_of, num_movers, use_device
from offbeat_ckptsync.values import Bucket, Piece, Sent, SyncOffer, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from concurrent.futures import Future

    import torch

    from offbeat_ckptsync.seams import BucketSender, WeightSource


NUM_BUFFERS = 4
"""One being filled, one being digested, two on the wire."""


class Shipper:
    """Takes full buffers, hands them back empty; with lent memory every bucket has its own place and none comes back."""

    def __init__(
        self,
        offer: SyncOffer,
        open_sender: Callable[[], BucketSender],
        buckets: tuple[Bucket, ...],
        *,
        buffers: Buffers,
        lent: torch.Tensor | None,
        parallel: bool = False,
    ) -> None:
        """Start the threads; `open_sender` is called in one of them. With `parallel` several complete buckets.

        Without `lent` they are filled in memory of `buffers`, which has it back once all has left.
        """
        self._offer = offer
        self._sender: BucketSender | None = None
        self._open_sender = open_sender
        self._lent = lent
        self._starts, _ = bucket_starts(buckets)
        self._free: queue.Queue[torch.Tensor | None] = queue.Queue()
        self._full: queue.Queue[tuple[Bucket, BucketBuilder, Future[str]] | None] = queue.Queue()
        self.digests: list[str] = []  # of what has left
        self.digest_s = self.wire_s = 0.0  # in the shipping threads
        self.wire_bytes = 0
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._timeout_s = float(offer.endpoint["timeout_s"])
        num_packers = num_movers() if parallel else 1
        # Bounds how many tensors wait to be packed where there is a place for every bucket.
        self._room = threading.Semaphore(NUM_BUFFERS + num_packers)
        self._buffers = buffers
        self._own: list[torch.Tensor] = []
        if lent is None:
            size = max((bucket.num_bytes for bucket in buckets), default=0)
            self._own = buffers.take(NUM_BUFFERS + num_packers - 1, size)
            for buffer in self._own:
                self._free.put(buffer)
        self._device = buffers.device
        self._pack_stream, self.wire_stream = SideStream(self._device), SideStream(self._device)
        self._packers = ThreadPoolExecutor(num_packers, thread_name_prefix=f"pack {offer.sync_id}")
        # A daemon: a transport that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"ship {offer.sync_id}", daemon=True)
        self._thread.start()

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        """Return memory for `bucket`, uint8 of at least its size; waits for it at most the offer's `timeout_s`.

        Raises:
            TransferError: sending failed, or no buffer came free in time.
        """
        if self._error is not None:
            raise self._failure()
        try:
            if self._lent is not None:
                if not self._room.acquire(timeout=self._timeout_s):
                    raise queue.Empty
                start = self._starts[bucket.index]
                return self._lent[start : start + bucket.num_bytes]
            buffer = self._free.get(timeout=self._timeout_s)
        except queue.Empty:
            raise self._late() from None
        if buffer is None:
            raise self._failure()
        return buffer

    def ship(self, bucket: Bucket, filling: BucketBuilder, complete: Callable[[], str]) -> None:
        """Call `complete`, which fills what is missing and returns the digest, and then send the bucket."""
        mark = mark_of(filling.payload)

        def work() -> str:
            try:
                with self._pack_stream.after(mark):
                    return complete()
            finally:
                self._room.release()

        # Before the transport has it: what a transport spoils must not get a digest that fits.
        self._full.put((bucket, filling, self._packers.submit(work)))

    def cancel(self) -> None:
        """Stop; what is on the wire is lost. Harmless when nothing runs. No tensor is read afterwards."""
        self._cancelled.set()
        self._full.put(None)
        self._packers.shutdown(wait=True, cancel_futures=True)  # all they do is copy and digest

    def end(self) -> None:
        """Take no more buckets; return once all of them are complete, though they may not have left yet."""
        self._full.put(None)
        self._packers.shutdown(wait=True)  # all they do is copy and digest

    def finish(self) -> None:
        """Wait, after `end`, until everything has left, at most the offer's `timeout_s`.

        Raises:
            TransferError: it failed, or took longer.
        """
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            late = self._late()
            self.cancel()
            raise late
        if self._error is not None:
            raise self._failure()
        self._buffers.put_back(self._own)  # not after a failure: a transport may still hold on to one

    def _late(self) -> TransferError:
        waits_for = self._sender.waits_for() if self._sender is not None else "the receivers to be met"
        return TransferError(
            f"bucket {len(self.digests)} of version {self._offer.version} did not leave within {self._timeout_s:g} s"
            f"{f': the source waits for {waits_for}' if waits_for else ''}; raise `transfer_timeout_s` where nobody is stuck"
        )

    def _failure(self) -> SyncError:
        if isinstance(self._error, SyncError):
            return self._error
        return TransferError(f"sending bucket {len(self.digests)} failed: {self._error!r}")

    def _run(self) -> None:
        try:
            use_device(self._device)
            sender = self._sender = self._open_sender()
            # Others need the buffers of those that are under way.
            for under_way in oldest_first(self._begun(sender), min(sender.in_flight, NUM_BUFFERS - 1)):
                if self._cancelled.is_set():
                    break
                self._land(*under_way)
            if not self._cancelled.is_set():
                mark = time.perf_counter()
                sender.close()
                self.wire_s += time.perf_counter() - mark
        except BaseException as error:  # noqa: BLE001 -- handed to the packing thread, which raises it
            self._error = error
            self._free.put(None)  # wakes a packer that waits for a buffer

    def _begun(self, sender: BucketSender) -> Iterator[tuple[Callable[[], None], BucketBuilder, str]]:
        """Begin to send bucket after bucket, and yield what waits for each to leave, its buffer and its digest."""
        while (item := self._full.get()) is not None and not self._cancelled.is_set():
            bucket, filling, digested = item
            result = digested.result(self._timeout_s)
            mark = time.perf_counter()
            with self.wire_stream.after():  # a digest has waited for the filling
                sender.vouch(bucket, result)
                end = sender.start(bucket, filling.payload)
            self.wire_s += time.perf_counter() - mark
            yield end, filling, result

    def _land(self, end: Callable[[], None], filling: BucketBuilder, result: str) -> None:
        """Wait until a bucket that is under way has left, and take its buffer back."""
        mark = time.perf_counter()
        with self.wire_stream.after():
            end()
        self.wire_bytes += filling.payload.numel()
        self.wire_s += time.perf_counter() - mark
        self.digest_s += filling.digest_s
        self.digests.append(result)
        if self._lent is None:
            self._free.put(filling.buffer)


FIRST = (0,)
"""The ranks that send where nothing else is said."""


def walk(source: WeightSource, senders: Collection[int] = FIRST) -> int:
    """Iterate `source` to its end and drop the tensors; return their number.

    What every rank of a sharded source but `senders` calls while these run `gather_weights`: gathering is collective.
    """
    return sum(1 for _ in source.tensors_on(senders))


def gather_weights(
    source: WeightSource,
    offer: SyncOffer,
    open_sender: Callable[[], BucketSender],
    *,
    buffers: Callable[[], Buffers] = Buffers,
    lend: Callable[[int], torch.Tensor | None] = lambda _: None,
    senders: Collection[int] = FIRST,
) -> Callable[[], Sent]:
    """Copy out what `source` yields as `offer` says it; return a call that waits until all has left and says what was sent.

    The caller's thread iterates and packs, into the memory, uint8 [num_bytes] of all buckets, that `lend` gives, else into
    that of `buffers()` (fresh, in host memory, by default); other threads open the sender, so that meeting the receivers overlaps with gathering, digest and
    send. This rank of `source` is one of `senders`. Whatever fails, `source` is iterated to its end first: the other ranks of a
    collective source are never left waiting half-way. Once this returns, no tensor of the source is read any more: the weights
    may change while buckets are on the wire.

    Raises:
        ManifestError: the source yields other tensors than it offered, or none on this rank.
        TransferError: somebody wrote into the weights meanwhile (`WeightSource.writes`).
        TransferError: the transport failed or took longer than the offer's `timeout_s`; names the bucket.
    """
    started, writes = time.perf_counter(), source.writes()
    try:
        _, num_bytes = bucket_starts(buckets_of(offer))
        lent = lend(num_bytes)
        stream = BucketStream(offer, open_sender, buffers=buffers(), lent=lent, stays=source.tensors_stay)
    except Exception:
        walk(source, senders)
        raise
    _pack(source, stream, senders)
    stream.end()
    if changed := [name for name, number in source.writes().items() if writes.get(name) != number]:
        stream.cancel()
        raise TransferError(
            f"{len(changed)} tensors were written to while they were copied out, {changed[0]!r} first: what was sent is a mixture "
            "of versions; let no optimizer step run beside a sync"
        )
    return lambda: stream.finish(started)


def _pack(source: WeightSource, stream: BucketStream, senders: Collection[int]) -> None:
    """Pack all that `source` yields; what fails is raised once it was iterated to its end."""
    failure: Exception | None = None
    try:
        mark = time.perf_counter()
        for name, tensor in source.tensors_on(senders):
            stream.gather_s += time.perf_counter() - mark
            if failure is None:
                try:
                    stream.add(name, _required(tensor, name, senders))
                except Exception as error:  # noqa: BLE001 -- raised below; memory may have run out
                    failure = error
                    stream.cancel()
            mark = time.perf_counter()
    except BaseException:
        stream.cancel()
        raise
    if failure is not None:
        raise failure


class BucketStream:
    """Packs tensors, given in manifest order, into planned buckets and ships each as it is full."""

    def __init__(
        self,
        offer: SyncOffer,
        open_sender: Callable[[], BucketSender],
        *,
        buffers: Buffers,
        lent: torch.Tensor | None,
        stays: bool,
    ) -> None:
        """Ship what `offer` says, packed into `lent` or `buffers`; `stays`: tensors do also after `add` has returned."""
        self.gather_s = 0.0
        self._offer = offer
        self._packing = BusyClock()
        self._later = stays and buffers.device == "cpu"
        self._manifest = offer.manifest
        self._buckets = buckets_of(offer)
        self._next_spec = 0
        self._places: dict[int, list[tuple[Bucket, Piece]]] = {}  # of each tensor's bytes
        self._ends: dict[int, Piece] = {}  # the last one of each bucket
        for bucket in self._buckets:
            for piece in bucket.pieces:
                self._places.setdefault(piece.spec_index, []).append((bucket, piece))
                self._ends[bucket.index] = piece
        self._open: dict[int, BucketBuilder] = {}  # one at most
        self._last: BucketBuilder | None = None  # that was begun
        self._shipper = Shipper(
            offer, open_sender, self._buckets, buffers=buffers, lent=lent, parallel=self._later
        )

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Pack the next tensor; waits for a free buffer at most the offer's `timeout_s`.

        Raises:
            ManifestError: it is not the tensor that the offer has here.
            TransferError: the shipping thread failed, or no buffer came free in time.
        """
        specs = self._manifest.specs
        if self._next_spec >= len(specs):
            raise ManifestError(f"the source yields {name!r} after the {len(specs)} tensors it offered")
        _check_is(specs[self._next_spec], name, tensor)
        data = bytes_of(tensor)
        for bucket, piece in self._places.get(self._next_spec, []):
            filling = self._open_bucket(bucket)
            if self._later and data.device.type == "cpu":
                filling.waiting.append((piece, data))
            else:
                with self._packing:
                    filling.add(piece, data)
            if piece is self._ends[bucket.index]:
                del self._open[bucket.index]
                self._shipper.ship(bucket, filling, lambda b=bucket, f=filling: self._complete(b, f))
        self._next_spec += 1

    def end(self) -> None:
        """Wait until everything is copied: no tensor is read afterwards.

        Raises:
            ManifestError: tensors that were offered did not come.
        """
        specs = self._manifest.specs
        if self._next_spec < len(specs):
            self.cancel()
            raise ManifestError(f"the source ended before {specs[self._next_spec].name!r}, which it offered")
        self._shipper.end()

    def finish(self, started: float) -> Sent:
        """Wait, after `end`, until everything has left; return what was sent since `started` (of `time.perf_counter`).

        Raises:
            TransferError: the transport failed.
        """
        self._shipper.finish()
        return Sent(
            version=self._offer.version,
            manifest_digest=self._manifest.digest,
            bucket_digests=tuple(self._shipper.digests),
            num_bytes=sum(bucket.num_bytes for bucket in self._buckets),
            gather_s=self.gather_s,
            pack_s=self._packing.seconds,
            wire_s=self._shipper.wire_s,
            digest_s=self._shipper.digest_s,
            wire_bytes=self._shipper.wire_bytes,
            send_s=time.perf_counter() - started,
        )

    def cancel(self) -> None:
        """Stop shipping; what is on the wire is lost. Harmless when nothing runs."""
        if self._last is not None:
            self._last.settle()  # and what was copied before it
        self._shipper.cancel()

    def _open_bucket(self, bucket: Bucket) -> BucketBuilder:
        if bucket.index not in self._open:
            buffer = self._shipper.buffer(bucket)
            self._last = BucketBuilder(bucket, buffer, digests_pieces=self._later)
            self._open[bucket.index] = self._last
        return self._open[bucket.index]

    def _complete(self, bucket: Bucket, filling: BucketBuilder) -> str:
        with self._packing:
            for piece, data in filling.waiting:
                filling.add(piece, data)
            filling.settle()
            return filling.digest()


def _required(tensor: torch.Tensor | None, name: str, senders: Collection[int]) -> torch.Tensor:
    if tensor is None:
        raise ManifestError(
            f"the source gives this rank nothing of {name!r}: it is none of those that send, {sorted(senders)}"
        )
    return tensor


def _check_is(spec: TensorSpec, name: str, tensor: torch.Tensor) -> None:
    got = TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
    if got != spec:
        raise ManifestError(
            f"the source yields {got.name!r} {got.shape} {got.dtype} where it offered {spec.name!r} {spec.shape} "
            f"{spec.dtype}; `tensors` must follow `manifest`"
        )
