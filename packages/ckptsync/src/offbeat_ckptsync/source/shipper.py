"""The threads of a sender: buckets are completed and digested, then sent, while the caller goes on with the next ones."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.plan.buckets import bucket_starts
from offbeat_ckptsync.threads import SideStream, mark_of, num_movers, use_device

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import torch

    from offbeat_ckptsync.seams import BucketSender
    from offbeat_ckptsync.source.buffers import BucketBuilder, Buffers
    from offbeat_ckptsync.values import Bucket, SyncOffer

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
        self._flying: deque[tuple[Callable[[], None], BucketBuilder, str]] = (
            deque()
        )  # begun, the oldest first
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
            while (item := self._full.get()) is not None and not self._cancelled.is_set():
                self._send(sender, *item)
            while self._flying and not self._cancelled.is_set():
                self._land()
            if not self._cancelled.is_set():
                mark = time.perf_counter()
                sender.close()
                self.wire_s += time.perf_counter() - mark
        except BaseException as error:  # noqa: BLE001 -- handed to the packing thread, which raises it
            self._error = error
            self._free.put(None)  # wakes a packer that waits for a buffer

    def _send(
        self, sender: BucketSender, bucket: Bucket, filling: BucketBuilder, digested: Future[str]
    ) -> None:
        """Begin to send a bucket, and wait for the oldest ones where too many are under way: others need their buffers."""
        result = digested.result(self._timeout_s)
        mark = time.perf_counter()
        with self.wire_stream.after():  # a digest has waited for the filling
            sender.vouch(bucket, result)
            end = sender.start(bucket, filling.payload)
        self.wire_s += time.perf_counter() - mark
        self._flying.append((end, filling, result))
        while len(self._flying) >= min(sender.in_flight, NUM_BUFFERS - 1):
            self._land()

    def _land(self) -> None:
        """Wait until the oldest bucket that is under way has left, and take its buffer back."""
        end, filling, result = self._flying[0]
        mark = time.perf_counter()
        with self.wire_stream.after():
            end()
        self._flying.popleft()
        self.wire_bytes += filling.payload.numel()
        self.wire_s += time.perf_counter() - mark
        self.digest_s += filling.digest_s
        self.digests.append(result)
        if self._lent is None:
            self._free.put(filling.buffer)
