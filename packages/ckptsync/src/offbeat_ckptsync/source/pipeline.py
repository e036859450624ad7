"""The sending side of one sync: gather and pack bucket k + 1 while bucket k is digested and sent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import ManifestError, TransferError
from offbeat_ckptsync.plan.buckets import bucket_starts, buckets_of, bytes_of
from offbeat_ckptsync.plan.manifest import dtype_name
from offbeat_ckptsync.source.buffers import BucketBuilder, Buffers
from offbeat_ckptsync.source.shipper import Shipper
from offbeat_ckptsync.threads import BusyClock
from offbeat_ckptsync.values import Bucket, Piece, Sent, SyncOffer, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from offbeat_ckptsync.seams import BucketSender, WeightSource


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
