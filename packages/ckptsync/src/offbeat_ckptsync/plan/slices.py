"""Which part of which tensor each receiving rank needs, and how a sync is cut so that nobody gets more. Pure.

A rank declares a layout: for a tensor the cuts it needs, stretches along one dimension; a tensor without a word it needs
whole. The borders of all ranks' cuts lie over a tensor as a grid; each cell becomes a tensor of the manifest that is sent,
with a part: the number of its audience, the ranks that need it. Buckets hold cells of one part only.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.plan.manifest import dtype_of, make_manifest
from offbeat_ckptsync.seams import WeightSource
from offbeat_ckptsync.values import Cell, Cut, Layout, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from offbeat_ckptsync.values import Bucket, Manifest, Seat, SyncOffer

Layouts = dict[str, dict[int, Layout]]
"""By member and rank. A member that is not here takes everything."""

_SHOWN = 8


def cut_offer(offer: SyncOffer, layouts: Layouts, like: SyncOffer | None = None) -> SyncOffer:
    """Return `offer` cut for these ranks, or as it is where nobody needs less than everything.

    `like` is an offer of the same tensors whose cut is to be used again, so that its label is reached once more; ranks
    whose borders are others then get every cell they touch.

    Raises:
        ManifestError: a layout does not fit the tensors, or the ranks of a member leave elements out; with names.
    """
    manifest = offer.manifest
    _check(manifest, layouts)
    if like is not None:
        if like.whole is None or like.whole.digest != manifest.digest:
            return offer
        audiences = _audiences(like.whole, like.manifest, like.cells, layouts)
        return dataclasses.replace(
            offer, manifest=like.manifest, whole=manifest, cells=like.cells, audiences=audiences
        )
    if all(not layout for ranks in layouts.values() for layout in ranks.values()):
        return offer
    rows = [(index, *block) for index, spec in enumerate(manifest.specs) for block in _grid(spec, layouts)]
    parts: dict[frozenset[str], int] = {}
    specs: list[TensorSpec] = []
    for index, starts, stops in rows:
        spec = manifest.specs[index]
        audience = frozenset(
            key_of(member, rank)
            for member, rank, layout in _ranks(layouts)
            if _touches(spec, layout, starts, stops)
        )
        part = parts.setdefault(audience, len(parts))
        specs.append(cell_spec(spec, starts, stops, part))
    cells = tuple(Cell(spec_index=index, starts=starts) for index, starts, _ in rows)
    cut = make_manifest(specs)
    return dataclasses.replace(
        offer, manifest=cut, whole=manifest, cells=cells, audiences=_audiences(manifest, cut, cells, layouts)
    )


def key_of(member: str, rank: int) -> str:
    """Return how `SyncOffer.audiences` calls a rank."""
    return f"{member}/{rank}"


def cell_spec(spec: TensorSpec, starts: tuple[int, ...], stops: tuple[int, ...], part: int) -> TensorSpec:
    """Return the spec of a cell: its name says where it lies."""
    where = ",".join(f"{a}:{b}" for a, b in zip(starts, stops, strict=True))
    shape = tuple(b - a for a, b in zip(starts, stops, strict=True))
    return TensorSpec(name=f"{spec.name}[{where}]", shape=shape, dtype=spec.dtype, part=part)


def check_cut(offer: SyncOffer, seat: Seat, layout: Layout) -> None:
    """Make sure that the cells of an offer are its tensors, each once, and that this rank gets all it needs.

    Raises:
        ManifestError: they are not; names the first tensor.
    """
    if offer.whole is None:
        return
    if len(offer.cells) != len(offer.manifest.specs):
        raise ManifestError(f"{len(offer.cells)} cells for {len(offer.manifest.specs)} cut tensors")
    covered = [0] * len(offer.whole.specs)
    own = parts_of(offer, seat)
    for cell, piece in zip(offer.cells, offer.manifest.specs, strict=True):
        spec = offer.whole.specs[cell.spec_index]
        stops = tuple(a + size for a, size in zip(cell.starts, piece.shape, strict=True))
        if piece != cell_spec(spec, cell.starts, stops, piece.part):
            raise ManifestError(f"cut tensor {piece.name!r} is no cell of {spec.name!r} {spec.shape}")
        if any(b > size for b, size in zip(stops, spec.shape, strict=True)):
            raise ManifestError(f"cut tensor {piece.name!r} reaches beyond {spec.shape}")
        covered[cell.spec_index] += math.prod(piece.shape)
        if own is not None and piece.part not in own and _touches(spec, layout, cell.starts, stops):
            raise ManifestError(
                f"rank {seat.rank} of {seat.member} needs {piece.name!r} and is not to get it"
            )
    for spec, num in zip(offer.whole.specs, covered, strict=True):
        if num != math.prod(spec.shape):
            raise ManifestError(f"the cells of {spec.name!r} hold {num} elements of {math.prod(spec.shape)}")


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


_Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a block starts and stops along each dimension."""


def _grid(spec: TensorSpec, layouts: Layouts) -> Iterator[_Block]:
    borders = [{0, size} for size in spec.shape]
    for _, _, layout in _ranks(layouts):
        for cut in layout.get(spec.name, ()):
            borders[cut.dim] |= {cut.start, cut.start + cut.length}
    if 0 in spec.shape:
        yield (0,) * len(spec.shape), spec.shape
        return
    for block in itertools.product(*(itertools.pairwise(sorted(each)) for each in borders)):
        yield tuple(a for a, _ in block), tuple(b for _, b in block)


def _regions(spec: TensorSpec, layout: Layout) -> list[_Block]:
    cuts = layout.get(spec.name)
    if cuts is None:
        return [((0,) * len(spec.shape), spec.shape)]
    regions: list[_Block] = []
    for cut in cuts:
        starts, stops = [0] * len(spec.shape), list(spec.shape)
        starts[cut.dim], stops[cut.dim] = cut.start, cut.start + cut.length
        regions.append((tuple(starts), tuple(stops)))
    return regions


def _touches(spec: TensorSpec, layout: Layout, starts: tuple[int, ...], stops: tuple[int, ...]) -> bool:
    """Say whether a rank needs anything of a block; one without elements goes to whoever wants the tensor."""
    regions = _regions(spec, layout)
    if 0 in spec.shape:
        return bool(regions)
    return any(
        all(max(a, c) < min(b, d) for a, b, c, d in zip(starts, stops, *region, strict=True))
        for region in regions
    )


def _region(
    spec: TensorSpec, region: _Block, cells: list[tuple[Cell, TensorSpec]], given: Mapping[str, torch.Tensor]
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


def _ranks(layouts: Layouts) -> Iterator[tuple[str, int, Layout]]:
    for member, ranks in layouts.items():
        for rank, layout in ranks.items():
            yield member, rank, layout


def _audiences(
    whole: Manifest, cut: Manifest, cells: tuple[Cell, ...], layouts: Layouts
) -> dict[str, tuple[int, ...]]:
    audiences: dict[str, tuple[int, ...]] = {}
    for member, rank, layout in _ranks(layouts):
        parts: set[int] = set()
        for cell, piece in zip(cells, cut.specs, strict=True):
            if piece.part not in parts:
                stops = tuple(a + size for a, size in zip(cell.starts, piece.shape, strict=True))
                if _touches(whole.specs[cell.spec_index], layout, cell.starts, stops):
                    parts.add(piece.part)
        audiences[key_of(member, rank)] = tuple(sorted(parts))
    return audiences


def _check(manifest: Manifest, layouts: Layouts) -> None:
    specs = {spec.name: spec for spec in manifest.specs}
    for member, rank, layout in _ranks(layouts):
        who = f"rank {rank} of {member}"
        for name, cuts in layout.items():
            if name not in specs:
                raise ManifestError(f"{who} declares a layout of unknown tensor {name!r}")
            _check_cuts(specs[name], cuts, who)
    for member, ranks in layouts.items():
        own: Layouts = {member: ranks}
        missing = [
            cell_spec(spec, starts, stops, 0).name
            for spec in manifest.specs
            if any(layout.get(spec.name) != () for layout in ranks.values())
            for starts, stops in _grid(spec, own)
            if not any(_touches(spec, layout, starts, stops) for layout in ranks.values())
        ]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ManifestError(f"the ranks of {member} leave out {', '.join(missing[:_SHOWN])}{more}")


def _check_cuts(spec: TensorSpec, cuts: tuple[Cut, ...], who: str) -> None:
    if len({cut.dim for cut in cuts}) > 1:
        raise ManifestError(f"{who} cuts {spec.name!r} along several dimensions; cut along one")
    for cut in cuts:
        inside = 0 <= cut.dim < len(spec.shape) and 0 <= cut.start <= cut.start + cut.length
        if not inside or cut.start + cut.length > spec.shape[cut.dim]:
            raise ManifestError(f"{who} needs {cut} of {spec.name!r}, whose shape is {spec.shape}")
