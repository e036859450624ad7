"""The bucket plan: which bytes of which tensor lie where. Pure; both sides compute the same one."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np
import torch

from offbeat_ckptsync.ends.manifest import dtype_of, num_bytes_of
from offbeat_ckptsync.errors import PlanError, TransferError
from offbeat_ckptsync.values import Bucket, Manifest, Piece, RankId, SyncOffer, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_Begun = TypeVar("_Begun")


def key_of(member: str, rank: int) -> str:
    """Return how `SyncOffer.endpoints` calls a rank."""
    return f"{member}/{rank}"


def missing_ranks(rank_ids: Collection[RankId], members: Sequence[str]) -> list[str]:
    """Return in words which ranks of `members` are not among `rank_ids`: of a member nobody of whom is there, the first."""
    here = {(rank_id.member, rank_id.rank) for rank_id in rank_ids}
    ranks = {rank_id.member: rank_id.num_ranks for rank_id in rank_ids}
    rank_ids_of = (
        RankId(member=member, rank=rank) for member in members for rank in range(ranks.get(member, 1))
    )
    return [str(rank_id) for rank_id in rank_ids_of if (rank_id.member, rank_id.rank) not in here]


def met_by(offer: SyncOffer, rank_id: RankId) -> tuple[SyncOffer, RankId]:
    """Return the offer and the rank_id as the transport of a receiving rank sees them.

    Where each rank meets a sender of its own, the rank is a member of its own there, called as in `endpoints`.

    Raises:
        TransferError: the others have senders of their own, and this rank has none.
    """
    if not offer.endpoints:
        return offer, rank_id
    name = key_of(rank_id.member, rank_id.rank)
    if name not in offer.endpoints:
        raise TransferError(
            f"{rank_id} has no sender: those of this sync are for {', '.join(offer.endpoints)}"
        )
    return met_at(offer, offer.endpoints[name]), RankId(member=name)


def met_at(offer: SyncOffer, endpoint: dict[str, str | int | float]) -> SyncOffer:
    """Return the offer as it is for those that meet at this one of several senders' endpoints."""
    return dataclasses.replace(offer, endpoint=endpoint, endpoints={})


class Pieces(Sequence[Piece]):
    """The pieces of a bucket as columns: a plan is asked for its buckets more often than for those.

    There are tens of thousands; objects for each, a garbage collector would go through again and again.
    """

    def __init__(self, *columns: Ints) -> None:
        """Hold the four columns of `Piece`, each int64 [pieces]."""
        self._columns = columns

    def __len__(self) -> int:
        """Return their number."""
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Pieces: ...
    def __getitem__(self, index: int | slice) -> Piece | Pieces:
        """Make one, or return some."""
        if isinstance(index, slice):
            return Pieces(*(column[index] for column in self._columns))
        return Piece(*(int(column[index]) for column in self._columns))

    def __iter__(self) -> Iterator[Piece]:
        """Yield all."""
        return map(Piece, *(column.tolist() for column in self._columns))

    def __eq__(self, other: object) -> bool:
        """Say whether these are the same."""
        return isinstance(other, Pieces) and all(map(np.array_equal, self._columns, other._columns))

    __hash__ = None  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


ALIGNMENT = 256
"""Alignment of tensors in buckets, in bytes: enough for any dtype and for vectorised copies on GPUs."""


@lru_cache(maxsize=4)  # both sides ask several times in a sync, and always for the same weights
def plan_buckets(manifest: Manifest, max_bytes: int) -> tuple[Bucket, ...]:
    """Lay the tensors of `manifest` into buckets of at most `max_bytes`, in manifest order.

    A tensor that does not fit into what is left of a bucket opens the next one; a tensor larger than a bucket is
    cut, starting on a fresh bucket and filling whole ones. So buckets laid end to end (each rounded up to
    `ALIGNMENT`) hold every tensor in one piece: a receiver can use it where it landed. A tensor without elements
    has no piece.

    Raises:
        PlanError: a bucket is smaller than the alignment.
    """
    room = max_bytes // ALIGNMENT * ALIGNMENT
    if room < ALIGNMENT:
        raise PlanError(
            f"a bucket of {max_bytes} bytes is smaller than the alignment {ALIGNMENT}; raise `bucket_mib`"
        )
    sizes = _sizes(manifest)
    places = np.flatnonzero(sizes > 0)
    return tuple(
        Bucket(index=index, num_bytes=pieces[-1].bucket_offset + pieces[-1].num_bytes, pieces=pieces)
        for index, pieces in enumerate(_fill(places, sizes[places], room))
    )


def buckets_of(offer: SyncOffer) -> tuple[Bucket, ...]:
    """Return the plan of an offer."""
    return plan_buckets(offer.manifest, offer.bucket_bytes)


def bucket_starts(buckets: tuple[Bucket, ...]) -> tuple[list[int], int]:
    """Return where each bucket starts when they lie end to end, and the bytes of them all."""
    *starts, end = accumulate((round_up(bucket.num_bytes, ALIGNMENT) for bucket in buckets), initial=0)
    return starts, end


def oldest_first(begun: Iterable[_Begun], most: int) -> Iterator[_Begun]:
    """Yield what was begun, the oldest first, as soon as `most` are under way, and the rest in the end."""
    under_way = deque[_Begun]()
    for each in begun:
        under_way.append(each)
        if len(under_way) >= most:
            yield under_way.popleft()
    yield from under_way


def tensor_views(
    manifest: Manifest, buckets: tuple[Bucket, ...], staged: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of `manifest` as a view of `staged`, uint8, where buckets lie end to end; nothing is copied."""
    first: dict[int, int] = {}
    for bucket, start in zip(buckets, bucket_starts(buckets)[0], strict=True):
        for piece in bucket.pieces:
            if piece.tensor_offset == 0:
                first[piece.spec_index] = start + piece.bucket_offset
    for index, spec in enumerate(manifest.specs):
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


def _sizes(manifest: Manifest) -> Ints:
    """Return the bytes of each tensor, int64 [tensors]."""
    return np.array([num_bytes_of(spec) for spec in manifest.specs], dtype=np.int64)


def _fill(places: Ints, sizes: Ints, room: int) -> Iterator[Pieces]:
    """Yield the buckets of tensors of these `sizes`, none of which is 0; `places` says where each is in the manifest."""
    taken = (sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = np.cumsum(taken)
    first = 0
    while first < len(sizes):
        size = int(sizes[first])
        ahead = (size - 1) // room * room  # of a tensor larger than a bucket, what fills whole ones
        for offset in range(0, ahead, room):
            yield Pieces(*(np.array([number]) for number in (places[first], offset, 0, room)))
        start = int(ends[first]) - round_up(size - ahead, ALIGNMENT)
        last = int(np.searchsorted(ends, start + room, side="right"))
        offsets = ends[first:last] - taken[first:last] - start
        within, numbers = np.zeros_like(offsets), sizes[first:last].copy()
        offsets[0], within[0], numbers[0] = 0, ahead, size - ahead
        yield Pieces(places[first:last], within, offsets, numbers)
        first = last
