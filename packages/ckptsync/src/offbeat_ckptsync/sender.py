"""The sending side of one sync: gather, pack and digest bucket k+1 while bucket k is sent."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.digest import digest
from offbeat_ckptsync.errors import ManifestError, SyncError, TransferError
from offbeat_ckptsync.manifest import dtype_name
from offbeat_ckptsync.plan import bytes_of, gaps, plan_buckets
from offbeat_ckptsync.types import Bucket, Sent, SyncOffer, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_ckptsync.interface import BucketSender, WeightSource

_NUM_BUFFERS = 2


def walk(source: WeightSource) -> int:
    """Iterate `source` to its end and drop the tensors; return their number.

    What every rank but rank 0 of a sharded source calls while rank 0 runs `send_weights`: gathering is collective.
    """
    return sum(1 for _ in source.tensors())


def send_weights(
    source: WeightSource, offer: SyncOffer, open_sender: Callable[[], BucketSender], *, device: str = "cpu"
) -> Sent:
    """Send what `source` yields as `offer` says it, and return what was sent.

    The caller's thread iterates, packs and digests; a second thread opens the sender (so that meeting the receivers
    overlaps with gathering) and sends. Whatever fails, `source` is iterated to its end before the error is raised:
    the other ranks of a collective source are never left waiting half-way.

    Raises:
        ManifestError: the source yields other tensors than it offered.
        TransferError: the transport failed or took longer than the offer's `timeout_s`; names the bucket.
    """
    stream = BucketStream(offer, open_sender, device=device)
    failure: SyncError | None = None
    try:
        mark = time.perf_counter()
        for name, tensor in source.tensors():
            stream.gather_s += time.perf_counter() - mark
            if failure is None:
                try:
                    stream.add(name, tensor)
                except SyncError as error:
                    failure = error
                    stream.cancel()
            mark = time.perf_counter()
    except BaseException:
        stream.cancel()
        raise
    if failure is not None:
        raise failure
    return stream.finish()


class BucketStream:
    """Packs tensors, given in manifest order, into planned buckets and ships each as it is full."""

    def __init__(self, offer: SyncOffer, open_sender: Callable[[], BucketSender], *, device: str) -> None:
        self.gather_s = 0.0
        self._pack_s = 0.0  # digests included
        self._digests: list[str] = []
        self._offer = offer
        self._buckets = plan_buckets(offer.manifest, offer.bucket_bytes)
        self._next_spec = 0
        self._next_bucket = 0
        self._next_piece = 0
        self._buffer: torch.Tensor | None = None
        size = max((bucket.num_bytes for bucket in self._buckets), default=0)
        self._shipper = _Shipper(offer, open_sender, size, device)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Pack the next tensor; waits for a free buffer at most the offer's `timeout_s`.

        Raises:
            ManifestError: it is not the tensor that the offer has here.
            TransferError: the shipping thread failed, or no buffer came free in time.
        """
        specs = self._offer.manifest.specs
        if self._next_spec >= len(specs):
            raise ManifestError(f"the source yields {name!r} after the {len(specs)} tensors it offered")
        _check_is(specs[self._next_spec], name, tensor)
        data = bytes_of(tensor)
        while (piece := self._piece()) is not None and piece.spec_index == self._next_spec:
            buffer = self._open_bucket()
            mark = time.perf_counter()
            into = buffer[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
            into.copy_(data[piece.tensor_offset : piece.tensor_offset + piece.num_bytes])
            self._pack_s += time.perf_counter() - mark
            self._advance()
        self._next_spec += 1

    def finish(self) -> Sent:
        """Wait until everything has left and return what was sent.

        Raises:
            ManifestError: tensors that were offered did not come.
            TransferError: the transport failed.
        """
        specs = self._offer.manifest.specs
        if self._next_spec < len(specs):
            self.cancel()
            raise ManifestError(f"the source ended before {specs[self._next_spec].name!r}, which it offered")
        wire_s = self._shipper.finish()
        return Sent(
            version=self._offer.version,
            manifest_digest=self._offer.manifest.digest,
            bucket_digests=tuple(self._digests),
            num_bytes=sum(bucket.num_bytes for bucket in self._buckets),
            gather_s=self.gather_s,
            pack_s=self._pack_s,
            wire_s=wire_s,
        )

    def cancel(self) -> None:
        """Stop shipping; what is on the wire is lost. Harmless when nothing runs."""
        self._shipper.cancel()

    def _piece(self):  # noqa: ANN202 -- Piece | None, inferred
        if self._next_bucket == len(self._buckets):
            return None
        return self._buckets[self._next_bucket].pieces[self._next_piece]

    def _open_bucket(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = self._shipper.free_buffer()
            for start, end in gaps(self._buckets[self._next_bucket]):
                self._buffer[start:end].zero_()  # both sides digest the padding too
        return self._buffer

    def _advance(self) -> None:
        bucket = self._buckets[self._next_bucket]
        self._next_piece += 1
        if self._next_piece == len(bucket.pieces):
            assert self._buffer is not None
            mark = time.perf_counter()
            # Here, before the transport has it: what a transport spoils must not get a digest that fits.
            self._digests.append(digest(self._buffer[: bucket.num_bytes]))
            self._pack_s += time.perf_counter() - mark
            self._shipper.ship(bucket, self._buffer)
            self._buffer = None
            self._next_bucket += 1
            self._next_piece = 0


class _Shipper:
    """The thread that sends full buffers and hands them back empty."""

    def __init__(
        self, offer: SyncOffer, open_sender: Callable[[], BucketSender], buffer_bytes: int, device: str
    ) -> None:
        self._offer = offer
        self._open_sender = open_sender
        self._free: queue.Queue[torch.Tensor | None] = queue.Queue()
        self._full: queue.Queue[tuple[Bucket, torch.Tensor] | None] = queue.Queue()
        for _ in range(_NUM_BUFFERS):
            self._free.put(torch.empty(buffer_bytes, dtype=torch.uint8, device=device))
        self._num_sent = 0
        self._wire_s = 0.0
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._timeout_s = float(offer.endpoint["timeout_s"])
        # A daemon: a transport that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"ship {offer.sync_id}", daemon=True)
        self._thread.start()

    def free_buffer(self) -> torch.Tensor:
        try:
            buffer = self._free.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TransferError(
                f"sending bucket {self._num_sent} of version {self._offer.version} took longer than "
                f"{self._timeout_s:g} s; raise `transfer_timeout_s` or look for a stuck receiver"
            ) from None
        if buffer is None:
            raise self._failure()
        return buffer

    def ship(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        self._full.put((bucket, buffer))

    def cancel(self) -> None:
        self._cancelled.set()
        self._full.put(None)

    def finish(self) -> float:
        self._full.put(None)
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            self.cancel()
            raise TransferError(
                f"bucket {self._num_sent} of version {self._offer.version} did not leave within "
                f"{self._timeout_s:g} s; raise `transfer_timeout_s` or look for a stuck receiver"
            )
        if self._error is not None:
            raise self._failure()
        return self._wire_s

    def _failure(self) -> SyncError:
        if isinstance(self._error, SyncError):
            return self._error
        return TransferError(f"sending bucket {self._num_sent} failed: {self._error!r}")

    def _run(self) -> None:
        try:
            sender = self._open_sender()
            while (item := self._full.get()) is not None and not self._cancelled.is_set():
                self._send(sender, *item)
            if not self._cancelled.is_set():
                mark = time.perf_counter()
                sender.close()
                self._wire_s += time.perf_counter() - mark
        except BaseException as error:  # noqa: BLE001 -- handed to the packing thread, which raises it
            self._error = error
            self._free.put(None)  # wakes a packer that waits for a buffer

    def _send(self, sender: BucketSender, bucket: Bucket, buffer: torch.Tensor) -> None:
        payload = buffer[: bucket.num_bytes]
        mark = time.perf_counter()
        sender.send(bucket, payload)
        self._wire_s += time.perf_counter() - mark
        self._num_sent += 1
        self._free.put(buffer)


def _check_is(spec: TensorSpec, name: str, tensor: torch.Tensor) -> None:
    got = TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
    if got != spec:
        raise ManifestError(
            f"the source yields {got.name!r} {got.shape} {got.dtype} where it offered {spec.name!r} {spec.shape} "
            f"{spec.dtype}; `tensors` must follow `manifest`"
        )
