"""Which part of which tensor each receiving rank needs, and how it gets that from a cut sync (`cutting`). Pure.

A rank declares a layout: for a tensor the cuts it needs, stretches along one dimension; a tensor without a word it needs
whole. The borders of all ranks' cuts lie over a tensor as a grid; each cell becomes a tensor of the manifest that is sent,
with a part: the number of its audience, the ranks that need it. Buckets hold cells of one part only.
"""

from __future__ import annotations

import dataclasses
import math
from operator import add, gt
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.errors import ManifestError, TransferError
from offbeat_ckptsync.plan.manifest import dtype_of
from offbeat_ckptsync.seams import WeightSource
from offbeat_ckptsync.values import Seat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from offbeat_ckptsync.values import Bucket, Cell, Cut, Layout, Manifest, SyncOffer, TensorSpec

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part of a tensor starts and stops along each dimension."""

PlainCuts = tuple[tuple[int, int, int], ...]
"""Cuts as (dim, start, length)."""


def key_of(member: str, rank: int) -> str:
    """Return how `SyncOffer.audiences` calls a rank."""
    return f"{member}/{rank}"


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


def where_of(starts: tuple[int, ...], stops: tuple[int, ...]) -> str:
    """Return what the name of a cell has behind its tensor's: where it lies."""
    return "[" + ",".join(f"{a}:{b}" for a, b in zip(starts, stops, strict=True)) + "]"


def check_cut(offer: SyncOffer, seat: Seat, layout: Layout) -> None:
    """Make sure that the cells of an offer are its tensors, each once, and that this rank gets all it needs.

    Raises:
        ManifestError: they are not; names the first tensor.
    """
    if offer.whole is None:
        return
    own = parts_of(offer, seat)
    if any(
        whole is offer.whole
        and manifest is offer.manifest
        and cells is offer.cells
        and needs == (own, layout)
        for whole, manifest, cells, needs in _checked
    ):
        return  # these came with the last sync, too
    _check_cut(offer, seat, layout, own)
    _checked[:] = [(offer.whole, offer.manifest, offer.cells, (own, layout)), *_checked[:7]]


_checked: list[tuple[Manifest, Manifest, tuple[Cell, ...], tuple[frozenset[int] | None, Layout]]] = []


def _check_cut(offer: SyncOffer, seat: Seat, layout: Layout, own: frozenset[int] | None) -> None:
    assert offer.whole is not None
    if len(offer.cells) != len(offer.manifest.specs):
        raise ManifestError(f"{len(offer.cells)} cells for {len(offer.manifest.specs)} cut tensors")
    covered = [0] * len(offer.whole.specs)
    ways = {name: plain_cuts(cuts) for name, cuts in layout.items()}
    for cell, piece in zip(offer.cells, offer.manifest.specs, strict=True):
        spec = offer.whole.specs[cell.spec_index]
        stops = tuple(map(add, cell.starts, piece.shape))
        if piece.name != spec.name + where_of(cell.starts, stops) or piece.dtype != spec.dtype:
            raise ManifestError(f"cut tensor {piece.name!r} is no cell of {spec.name!r} {spec.shape}")
        if any(map(gt, stops, spec.shape)):
            raise ManifestError(f"cut tensor {piece.name!r} reaches beyond {spec.shape}")
        covered[cell.spec_index] += math.prod(piece.shape)
        withheld = own is not None and piece.part not in own
        if withheld and touches(spec.shape, ways.get(spec.name), (cell.starts, stops)):
            raise ManifestError(f"{seat} needs {piece.name!r} and is not to get it")
    for spec, num in zip(offer.whole.specs, covered, strict=True):
        if num != math.prod(spec.shape):
            raise ManifestError(f"the cells of {spec.name!r} hold {num} elements of {math.prod(spec.shape)}")


def plain_cuts(cuts: tuple[Cut, ...]) -> PlainCuts:
    """Return cuts as tuples, which are compared and looked up faster."""
    return tuple((cut.dim, cut.start, cut.length) for cut in cuts)


def touches(shape: tuple[int, ...], cuts: PlainCuts | None, block: Block) -> bool:
    """Say whether who needs `cuts` of a tensor, or all where None, needs anything of a block of it.

    One without elements goes to whoever wants the tensor.
    """
    if cuts is None:
        return True
    if 0 in shape:
        return bool(cuts)
    starts, stops = block
    return any(max(starts[dim], start) < min(stops[dim], start + length) for dim, start, length in cuts)


def parts_of(offer: SyncOffer, seat: Seat) -> frozenset[int] | None:
    """Return the parts that a rank gets, or None for all."""
    if offer.whole is None:
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
        return self._offer.manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the tensors; one that was not offered is yielded as it is, for the packer to find out."""
        assert self._offer.whole is not None
        specs, cells = self._offer.whole.specs, _cells_by_tensor(self._offer)
        for index, (name, tensor) in enumerate(self._source.tensors()):
            offered = index < len(specs) and (name, tuple(tensor.shape)) == (
                specs[index].name,
                specs[index].shape,
            )
            if not offered:
                yield name, tensor
                continue
            for cell, piece in cells.get(index, []):
                yield piece.name, tensor[_slices(cell.starts, piece.shape)]


def assemble(
    offer: SyncOffer, layout: Layout, pieces: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield, for every tensor, what a rank needs of it; `pieces` are the staged cells, by their names.

    What is one cell is that cell, nothing copied; anything else is put together in fresh memory.
    """
    if offer.whole is None:
        yield from _sliced(layout, pieces)
        return
    given = dict(pieces)
    cells = _cells_by_tensor(offer)
    for index, spec in enumerate(offer.whole.specs):
        parts = [_region(spec, region, cells.get(index, []), given) for region in _regions(spec, layout)]
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


def _cells_by_tensor(offer: SyncOffer) -> dict[int, list[tuple[Cell, TensorSpec]]]:
    cells: dict[int, list[tuple[Cell, TensorSpec]]] = {}
    for cell, piece in zip(offer.cells, offer.manifest.specs, strict=True):
        cells.setdefault(cell.spec_index, []).append((cell, piece))
    return cells


def _regions(spec: TensorSpec, layout: Layout) -> list[Block]:
    cuts = layout.get(spec.name)
    if cuts is None:
        return [((0,) * len(spec.shape), spec.shape)]
    regions: list[Block] = []
    for cut in cuts:
        starts, stops = [0] * len(spec.shape), list(spec.shape)
        starts[cut.dim], stops[cut.dim] = cut.start, cut.start + cut.length
        regions.append((tuple(starts), tuple(stops)))
    return regions


def _region(
    spec: TensorSpec, region: Block, cells: list[tuple[Cell, TensorSpec]], given: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    starts, stops = region
    shape = tuple(b - a for a, b in zip(starts, stops, strict=True))
    for cell, piece in cells:
        if (cell.starts, piece.shape) == (starts, shape):
            return given[piece.name]
    whole: torch.Tensor | None = None
    for cell, piece in cells:
        ends = tuple(a + size for a, size in zip(cell.starts, piece.shape, strict=True))
        low = tuple(map(max, cell.starts, starts))
        size = tuple(max(0, min(b, d) - a) for a, b, d in zip(low, ends, stops, strict=True))
        if 0 in size:
            continue
        data = given[piece.name]
        whole = torch.empty(shape, dtype=data.dtype, device=data.device) if whole is None else whole
        into = whole[_slices(tuple(a - b for a, b in zip(low, starts, strict=True)), size)]
        into.copy_(data[_slices(tuple(a - b for a, b in zip(low, cell.starts, strict=True)), size)])
    return torch.empty(shape, dtype=dtype_of(spec.dtype)) if whole is None else whole


def _slices(starts: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + size) for a, size in zip(starts, shape, strict=True))
