"""Which part of which tensor each receiving rank needs, and how it gets that from a cut sync (`cutting`). Pure.

A rank declares a layout: for a tensor the cuts it needs, stretches along one dimension; a tensor without a word it needs
whole. The borders of all ranks' cuts lie over a tensor as a grid; each cell is sent as a tensor of its own (`cells`),
with a part: the number of its audience, the ranks that need it. Buckets hold cells of one part only.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise, product
from operator import add, gt
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.errors import ManifestError, TransferError
from offbeat_ckptsync.plan.cells import cell_spec, cells_of, sent_of
from offbeat_ckptsync.plan.manifest import dtype_of
from offbeat_ckptsync.seams import WeightSource
from offbeat_ckptsync.values import Bucket, Cell, Cut, Layout, Manifest, Seat, SyncOffer, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    Region = tuple[tuple[int, ...], tuple[int, ...]]
    """Where a part of a tensor starts along each dimension, and its shape."""


def key_of(member: str, rank: int) -> str:
    """Return how `SyncOffer.audiences` calls a rank."""
    return f"{member}/{rank}"


def missing_ranks(seats: Collection[Seat], members: Sequence[str]) -> list[str]:
    """Return in words which ranks of `members` are not among `seats`: of a member nobody of whom is there, the first."""
    here = {(seat.member, seat.rank) for seat in seats}
    ranks = {seat.member: seat.num_ranks for seat in seats}
    seats_of = (Seat(member=member, rank=rank) for member in members for rank in range(ranks.get(member, 1)))
    return [str(seat) for seat in seats_of if (seat.member, seat.rank) not in here]


def met_by(offer: SyncOffer, seat: Seat) -> tuple[SyncOffer, Seat]:
    """Return the offer and the seat as the transport of a receiving rank sees them.

    Where each rank meets a sender of its own, the rank is a member of its own there, called as in `endpoints`.

    Raises:
        TransferError: the others have senders of their own, and this rank has none.
    """
    if not offer.endpoints:
        return offer, seat
    name = key_of(seat.member, seat.rank)
    if name not in offer.endpoints:
        raise TransferError(f"{seat} has no sender: those of this sync are for {', '.join(offer.endpoints)}")
    return met_at(offer, offer.endpoints[name]), Seat(member=name)


def met_at(offer: SyncOffer, endpoint: dict[str, str | int | float]) -> SyncOffer:
    """Return the offer as it is for those that meet at this one of several senders' endpoints."""
    audiences = {key_of(name, 0): parts for name, parts in offer.audiences.items()}
    return dataclasses.replace(offer, endpoint=endpoint, audiences=audiences, endpoints={})


def check_cut(offer: SyncOffer, seat: Seat, layout: Layout) -> None:
    """Make sure that the cells of an offer are its tensors, each once, and that this rank gets all it needs.

    Raises:
        ManifestError: they are not; names the first tensor.
    """
    if offer.cutting is None:
        return
    kinds, kind_of = offer.cutting.kinds, offer.cutting.kind_of
    specs = offer.manifest.specs
    if len(kind_of) != len(specs) or not {*kind_of} <= {*range(len(kinds))}:
        raise ManifestError(f"{len(kind_of)} cut tensors of {len(kinds)} kinds for {len(specs)} tensors")
    own = parts_of(offer, seat)
    seen: set[object] = set()
    for spec, kind in zip(specs, kind_of, strict=True):
        cuts = layout.get(spec.name)
        if (kind, spec.shape, cuts) not in seen:
            seen.add((kind, spec.shape, cuts))
            _check_cells(spec, kinds[kind])
            for cell in kinds[kind]:
                if own is not None and cell.part not in own and touches(spec.shape, cuts, cell):
                    raise ManifestError(f"{seat} needs {cell_spec(spec, cell).name!r} and is not to get it")


def _check_cells(spec: TensorSpec, cells: Sequence[Cell]) -> None:
    for cell in cells:
        if len(cell.starts) != len(spec.shape) or len(cell.shape) != len(spec.shape):
            raise ManifestError(
                f"a cell from {cell.starts} of shape {cell.shape} is none of {spec.name!r} {spec.shape}"
            )
        if (
            any(map(gt, map(add, cell.starts, cell.shape), spec.shape))
            or min((*cell.starts, *cell.shape, 0)) < 0
        ):
            raise ManifestError(f"cut tensor {cell_spec(spec, cell).name!r} reaches beyond {spec.shape}")
    sides = [
        [*pairwise(sorted({cell.starts[dim] for cell in cells} | {size}))] or [(0, 0)]
        for dim, size in enumerate(spec.shape)
    ]
    blocks = {tuple(zip(cell.starts, map(add, cell.starts, cell.shape), strict=True)) for cell in cells}
    if not len(cells) == len(blocks) == math.prod(map(len, sides)) or blocks != {*product(*sides)}:
        raise ManifestError(
            f"the cells of {spec.name!r} hold not each of its elements once: they are no grid"
        )


def touches(shape: tuple[int, ...], cuts: tuple[Cut, ...] | None, cell: Cell) -> bool:
    """Say whether who needs `cuts` of a tensor, or all where None, needs anything of a cell of it.

    One without elements goes to whoever wants the tensor.
    """
    if cuts is None:
        return True
    if 0 in shape:
        return bool(cuts)
    return any(
        max(cell.starts[dim], start) < min(cell.starts[dim] + cell.shape[dim], start + length)
        for dim, start, length in cuts
    )


def parts_of(offer: SyncOffer, seat: Seat) -> frozenset[int] | None:
    """Return the parts that a rank gets, or None for all."""
    if offer.cutting is None:
        return None
    parts = offer.audiences.get(key_of(seat.member, seat.rank))
    return None if parts is None else frozenset(parts)


def own_buckets(offer: SyncOffer, seat: Seat, buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """Return the buckets that a rank gets, in order."""
    parts = parts_of(offer, seat)
    return buckets if parts is None else tuple(bucket for bucket in buckets if bucket.part in parts)


class CutSource(WeightSource):
    """Another source's tensors, cut as an offer says."""

    def __init__(self, source: WeightSource, offer: SyncOffer) -> None:
        """Yield the cells of `offer` out of what `source` yields."""
        self._source = source
        self._offer = offer
        self.tensors_stay = source.tensors_stay

    def manifest(self) -> Manifest:
        """Return the cut manifest."""
        return sent_of(self._offer)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the tensors; one that was not offered is yielded as it is, for the packer to find out."""
        return ((name, tensor) for name, tensor in self._cells(self._source.tensors()) if tensor is not None)

    def tensors_on(self, senders: Collection[int]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """As `tensors`; on other ranks None for each tensor of the source."""
        return self._cells(self._source.tensors_on(senders))

    def _cells(
        self, tensors: Iterable[tuple[str, torch.Tensor | None]]
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        cutting, specs = self._offer.cutting, self._offer.manifest.specs
        assert cutting is not None
        for index, (name, tensor) in enumerate(tensors):
            spec = specs[index] if index < len(specs) else None
            if tensor is None or spec is None or (name, tuple(tensor.shape)) != (spec.name, spec.shape):
                yield name, tensor
                continue
            for cell in cells_of(cutting, index):
                yield cell_spec(spec, cell).name, tensor[_slices(cell.starts, cell.shape)]


def assemble(
    offer: SyncOffer, layout: Layout, pieces: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield, for every tensor, what a rank needs of it; `pieces` are the staged cells, by their names.

    What is one cell is that cell, nothing copied; anything else is put together in fresh memory.
    """
    if offer.cutting is None:
        yield from _sliced(layout, pieces)
        return
    given = dict(pieces)
    for index, spec in enumerate(offer.manifest.specs):
        cells = cells_of(offer.cutting, index)
        parts = [_region(spec, region, cells, given) for region in _regions(spec, layout)]
        if len(parts) == 1:
            yield spec.name, parts[0]
        elif parts:
            yield spec.name, torch.cat(parts, dim=layout[spec.name][0].dim)


def _sliced(
    layout: Layout, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        cuts = layout.get(name)
        if cuts is None:
            yield name, tensor
        elif cuts:
            stretches = [tensor.narrow(cut.dim, cut.start, cut.length) for cut in cuts]
            yield name, stretches[0] if len(cuts) == 1 else torch.cat(stretches, dim=cuts[0].dim)


def _regions(spec: TensorSpec, layout: Layout) -> list[Region]:
    cuts = layout.get(spec.name)
    if cuts is None:
        return [((0,) * len(spec.shape), spec.shape)]
    regions: list[Region] = []
    for dim, start, length in cuts:
        starts, shape = [0] * len(spec.shape), list(spec.shape)
        starts[dim], shape[dim] = start, length
        regions.append((tuple(starts), tuple(shape)))
    return regions


def _region(
    spec: TensorSpec, region: Region, cells: Sequence[Cell], given: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    starts, shape = region
    for cell in cells:
        if (cell.starts, cell.shape) == region:
            return given[cell_spec(spec, cell).name]
    whole: torch.Tensor | None = None
    for cell in cells:
        low = tuple(map(max, cell.starts, starts))
        ends = map(min, map(add, cell.starts, cell.shape), map(add, starts, shape))
        size = tuple(max(0, end - a) for a, end in zip(low, ends, strict=True))
        if 0 in size:
            continue
        data = given[cell_spec(spec, cell).name]
        whole = torch.empty(shape, dtype=data.dtype, device=data.device) if whole is None else whole
        into = whole[_slices(tuple(a - b for a, b in zip(low, starts, strict=True)), size)]
        into.copy_(data[_slices(tuple(a - b for a, b in zip(low, cell.starts, strict=True)), size)])
    return torch.empty(shape, dtype=dtype_of(spec.dtype)) if whole is None else whole


def _slices(starts: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + size) for a, size in zip(starts, shape, strict=True))
