"""The bucket plan: which bytes of which tensor lie where. Pure; both sides compute the same one."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.errors import PlanError
from offbeat_ckptsync.plan.manifest import dtype_of, num_bytes_of
from offbeat_ckptsync.values import Bucket, Manifest, Piece, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ALIGNMENT = 256
"""Alignment of tensors in buckets, in bytes: enough for any dtype and for vectorised copies on GPUs."""


@lru_cache(maxsize=4)  # both sides ask several times in a sync, and always for the same weights
def plan_buckets(manifest: Manifest, max_bytes: int) -> tuple[Bucket, ...]:
    """Lay the tensors of `manifest` into buckets of at most `max_bytes`, in manifest order.

    A tensor that does not fit into what is left of a bucket opens the next one; a tensor larger than a bucket is
    cut, starting on a fresh bucket and filling whole ones. So buckets laid end to end (each rounded up to
    `ALIGNMENT`) hold every tensor in one piece: a receiver can use it where it landed. A tensor without elements
    has no piece. Tensors of one part share buckets, in the order in which their last bytes come.

    Raises:
        PlanError: a bucket is smaller than the alignment.
    """
    room = max_bytes // ALIGNMENT * ALIGNMENT
    if room < ALIGNMENT:
        raise PlanError(
            f"a bucket of {max_bytes} bytes is smaller than the alignment {ALIGNMENT}; raise `bucket_mib`"
        )
    layout = _Layout(room)
    for index, spec in enumerate(manifest.specs):
        layout.place(index, num_bytes_of(spec), spec.part)
    return layout.finish()


def bucket_starts(buckets: tuple[Bucket, ...]) -> tuple[list[int], int]:
    """Return where each bucket starts when they lie end to end, part by part, and the bytes of them all."""
    starts = [0] * len(buckets)
    end = 0
    for place in sorted(range(len(buckets)), key=lambda place: buckets[place].part):
        starts[place] = end
        end += round_up(buckets[place].num_bytes, ALIGNMENT)
    return starts, end


def tensor_views(
    manifest: Manifest, buckets: tuple[Bucket, ...], staged: torch.Tensor, starts: Sequence[int] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of `manifest` as a view of `staged`, uint8; nothing is copied.

    Buckets lie end to end, or at `starts`. Tensors none of whose bytes are in `buckets` are left out.
    """
    starts = bucket_starts(buckets)[0] if starts is None else starts
    first: dict[int, int] = {}
    for bucket, start in zip(buckets, starts, strict=True):
        for piece in bucket.pieces:
            if piece.tensor_offset == 0:
                first[piece.spec_index] = start + piece.bucket_offset
    for index, spec in enumerate(manifest.specs):
        if index in first or num_bytes_of(spec) == 0:
            yield spec.name, _view(spec, staged, first.get(index))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order, uint8 [num_bytes]; copies only what is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def gaps(bucket: Bucket) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of the padding inside a bucket: bytes that belong to no tensor and are sent as zero."""
    cursor = 0
    for piece in bucket.pieces:
        if piece.bucket_offset > cursor:
            yield cursor, piece.bucket_offset
        cursor = piece.bucket_offset + piece.num_bytes


def tensors_in(manifest: Manifest, bucket: Bucket) -> str:
    """Return the names of the tensors with bytes in `bucket`, for messages."""
    names = [manifest.specs[piece.spec_index].name for piece in bucket.pieces]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def round_up(num_bytes: int, alignment: int) -> int:
    """Return the least multiple of `alignment` that is not below `num_bytes`."""
    return (num_bytes + alignment - 1) // alignment * alignment


def _view(spec: TensorSpec, staged: torch.Tensor, start: int | None) -> torch.Tensor:
    dtype = dtype_of(spec.dtype)
    if start is None:
        return torch.empty(spec.shape, dtype=dtype, device=staged.device)
    return staged[start : start + num_bytes_of(spec)].view(dtype).view(spec.shape)


class _Layout:
    """Buckets being filled, one of each part at a time."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._done: list[tuple[int, list[Piece]]] = []
        self._open: dict[int, list[Piece]] = {}
        self._ends: dict[int, int] = {}  # of what is open, rounded up

    def place(self, spec_index: int, num_bytes: int, part: int) -> None:
        if num_bytes == 0:
            return
        offset = self._ends.get(part, 0)
        if offset and offset + num_bytes > self.room:
            self._close(part)
            offset = 0
        taken = 0
        while taken < num_bytes:
            size = min(num_bytes - taken, self.room - offset)
            piece = Piece(spec_index=spec_index, tensor_offset=taken, bucket_offset=offset, num_bytes=size)
            self._open.setdefault(part, []).append(piece)
            self._ends[part] = round_up(offset + size, ALIGNMENT)
            taken += size
            if taken < num_bytes:
                self._close(part)
                offset = 0

    def finish(self) -> tuple[Bucket, ...]:
        for part in [*self._open]:
            self._close(part)
        # In the order in which a source that yields tensors one by one completes them.
        self._done.sort(key=lambda done: (done[1][-1].spec_index, done[1][-1].tensor_offset))
        return tuple(
            Bucket(
                index=index,
                num_bytes=pieces[-1].bucket_offset + pieces[-1].num_bytes,
                pieces=tuple(pieces),
                part=part,
            )
            for index, (part, pieces) in enumerate(self._done)
        )

    def _close(self, part: int) -> None:
        self._done.append((part, self._open.pop(part)))
        self._ends[part] = 0
