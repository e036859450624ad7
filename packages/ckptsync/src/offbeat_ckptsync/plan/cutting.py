"""How a sync is cut so that no rank gets more than it needs (`slices` says what it needs). Pure, and cached by what it saw.

A mixture of experts has tens of thousands of tensors, a large site tens of ranks. But tensors come in few shapes that ranks cut in
few ways, and many ranks need the same: whatever is the same is worked out, and said, once.
"""

from __future__ import annotations

import dataclasses
import itertools
from itertools import chain
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.plan.buckets import buckets_of
from offbeat_ckptsync.plan.cells import where_of
from offbeat_ckptsync.plan.slices import key_of, touches
from offbeat_ckptsync.values import Cell, Cut, Cutting, Layout, Manifest, SyncOffer, TensorSpec
from offbeat_ckptsync.wire import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Cuts = tuple[Cut, ...] | None
    """Of one tensor, by one need; None: all of it."""

Layouts = dict[str, dict[int, "Layout"]]
"""By member and rank. A member that is not here takes everything."""

_SHOWN = 8
_AT_A_TIME = 4096  # tensors looked at in one go, so that other threads get their turn
_KEPT = 4  # cuts that are remembered: of all members, and of those that catch up


def cut_offer(offer: SyncOffer, layouts: Layouts, like: SyncOffer | None = None) -> SyncOffer:
    """Return `offer` cut for these ranks, or as it is where nobody needs less than everything.

    `like` is an offer of the same tensors whose cut is to be used again, so that its label is reached once more; ranks
    whose borders are others then get every cell they touch. Tens of thousands of tensors for tens of ranks take a good part
    of a second the first time: call it beside an event loop.

    Raises:
        ManifestError: a layout does not fit the tensors, or the ranks of a member leave elements out; with names.
    """
    manifest = offer.manifest
    if like is not None:
        if like.cutting is None or like.manifest.digest != manifest.digest:
            return offer
        cutting = like.cutting
        audiences = _Ranks(manifest, layouts).audiences_of(cutting) if layouts else {}
    elif all(not layout for ranks in layouts.values() for layout in ranks.values()):
        return offer
    else:
        cutting, audiences = _cut_once(manifest, layouts)
    return dataclasses.replace(offer, cutting=cutting, audiences=dict(audiences))


def prepared(offer: SyncOffer) -> SyncOffer:
    """Return `offer` with what else takes long worked out; whoever asks for it next finds it."""
    buckets_of(offer)
    encode(offer)
    return offer


_Cut = tuple[Cutting, dict[str, tuple[int, ...]]]
_done: list[tuple[str, Layouts, _Cut]] = []


def _cut_once(manifest: Manifest, layouts: Layouts) -> _Cut:
    """Return what `_Ranks.cut` does, from memory where these ranks needed the same of the same tensors before."""
    for digest, known, result in [*_done]:
        if digest == manifest.digest and known == layouts:
            return result
    result = _Ranks(manifest, layouts).cut()
    _done.append((manifest.digest, {member: dict(of) for member, of in layouts.items()}, result))
    del _done[:-_KEPT]
    return result


class _Ranks:
    """The ranks of a sync and its tensors: ranks that need the same are one need, tensors that are cut alike one kind."""

    def __init__(self, manifest: Manifest, layouts: Layouts) -> None:
        """Compare everything; raises `ManifestError` where it does not fit together."""
        self._manifest = manifest
        self._needs: list[Layout] = []
        self._keys: list[list[str]] = []  # of each need: the ranks that have it, as `audiences` names them
        self._who: list[str] = []  # of each need: a rank that has it, in words
        self._members: dict[frozenset[int], str] = {}  # the needs of its ranks: a member that has them
        self._add(layouts)
        self._kinds: dict[
            tuple[tuple[int, ...], tuple[Cuts, ...]], int
        ] = {}  # shape, and how each need cuts it
        self._kind_of = self._sort()
        self._check_cuts()
        for numbers, member in self._members.items():
            self._check_covers(member, sorted(numbers))

    def cut(self) -> _Cut:
        """Return how tensors are cut, and which parts each rank gets."""
        parts: dict[frozenset[int], int] = {}  # by the needs that touch it
        kinds = tuple(tuple(_cells(shape, ways, parts)) for shape, ways in self._kinds)
        got = [[part for each, part in parts.items() if n in each] for n in range(len(self._needs))]
        return Cutting(kinds=kinds, kind_of=tuple(self._kind_of)), self._by_rank(got)

    def audiences_of(self, cutting: Cutting) -> dict[str, tuple[int, ...]]:
        """Return which parts of a cut that was made for others each rank gets: those of which it needs anything."""
        kinds = list(self._kinds)
        got: list[set[int]] = [set() for _ in self._needs]
        for theirs, ours in set(zip(cutting.kind_of, self._kind_of, strict=True)):
            shape, ways = kinds[ours]
            for cell, (n, cuts) in itertools.product(cutting.kinds[theirs], enumerate(ways)):
                if touches(shape, cuts, cell):
                    got[n].add(cell.part)
        return self._by_rank(got)

    def _by_rank(self, got: Sequence[Iterable[int]]) -> dict[str, tuple[int, ...]]:
        return {key: tuple(sorted(got[n])) for n, keys in enumerate(self._keys) for key in keys}

    def _add(self, layouts: Layouts) -> None:
        for member, ranks in layouts.items():
            numbers: set[int] = set()
            for rank, layout in ranks.items():
                if layout not in self._needs:
                    self._needs.append(layout)
                    self._keys.append([])
                    self._who.append(f"rank {rank} of {member}")
                number = self._needs.index(layout)
                self._keys[number].append(key_of(member, rank))
                numbers.add(number)
            self._members.setdefault(frozenset(numbers), member)

    def _sort(self) -> list[int]:
        """Return the kind of each tensor; `_kinds` numbers them."""
        kinds, found = self._kinds, list[int]()
        for start in range(0, len(self._manifest.specs), _AT_A_TIME):
            specs = self._manifest.specs[start : start + _AT_A_TIME]
            names = [spec.name for spec in specs]
            columns = [list(map(need.get, names)) for need in self._needs]
            ways_of = zip(*columns, strict=True) if columns else [()] * len(specs)
            found += [
                kinds.setdefault((spec.shape, ways), len(kinds))
                for spec, ways in zip(specs, ways_of, strict=True)
            ]
        return found

    def _check_cuts(self) -> None:
        names = {spec.name for spec in self._manifest.specs}
        for need, who in zip(self._needs, self._who, strict=True):
            if not all(map(names.__contains__, need)):
                raise ManifestError(f"{who} declares a layout of unknown tensor {min(need.keys() - names)!r}")
        first = dict(zip(reversed(self._kind_of), reversed(self._manifest.specs), strict=True))
        for (_, ways), kind in self._kinds.items():
            for cuts, who in zip(ways, self._who, strict=True):
                _check_cuts(first[kind], cuts or (), who)

    def _check_covers(self, member: str, numbers: list[int]) -> None:
        missing: dict[int, list[str]] = {}
        for (shape, all_ways), kind in self._kinds.items():
            ways = [all_ways[n] for n in numbers]
            if any(cuts != () for cuts in ways):
                missing[kind] = [where_of(cell) for cell, needed in _grid(shape, ways) if not any(needed)]
        if any(missing.values()):
            told = [
                spec.name + where
                for spec, kind in zip(self._manifest.specs, self._kind_of, strict=True)
                for where in missing.get(kind, ())
            ]
            more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
            raise ManifestError(f"the ranks of {member} leave out {', '.join(told[:_SHOWN])}{more}")


def _cells(shape: tuple[int, ...], ways: Sequence[Cuts], parts: dict[frozenset[int], int]) -> Iterator[Cell]:
    """Yield the cells of a tensor; `parts` numbers audiences as they first come."""
    for cell, needed in _grid(shape, ways):
        audience = frozenset(n for n, touched in enumerate(needed) if touched)
        yield cell._replace(part=parts.setdefault(audience, len(parts)))


def _grid(shape: tuple[int, ...], ways: Sequence[Cuts]) -> Iterator[tuple[Cell, list[bool]]]:
    """Yield the blocks into which the borders of all cuts divide a tensor, and who needs anything of each.

    One without elements is one block.
    """
    borders = [{0, size} for size in shape]
    for dim, start, length in () if 0 in shape else chain.from_iterable(cuts or () for cuts in ways):
        borders[dim] |= {start, start + length}
    sides = [[*itertools.pairwise(sorted(each))] or [(0, 0)] for each in borders]
    for block in itertools.product(*sides):
        cell = Cell(starts=tuple(a for a, _ in block), shape=tuple(b - a for a, b in block), part=0)
        yield cell, [touches(shape, cuts, cell) for cuts in ways]


def _check_cuts(spec: TensorSpec, cuts: tuple[Cut, ...], who: str) -> None:
    if len({dim for dim, _, _ in cuts}) > 1:
        raise ManifestError(f"{who} cuts {spec.name!r} along several dimensions; cut along one")
    for dim, start, length in cuts:
        inside = 0 <= dim < len(spec.shape) and 0 <= start <= start + length
        if not inside or start + length > spec.shape[dim]:
            raise ManifestError(
                f"{who} needs elements {start} to {start + length} along dimension {dim} of {spec.name!r}, "
                f"whose shape is {spec.shape}"
            )
