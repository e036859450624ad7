"""How a sync is cut so that no rank gets more than it needs (`slices` says what it needs). Pure, and cached by what it saw.

A mixture of experts has tens of thousands of tensors, a large site tens of ranks. But tensors come in few shapes that ranks cut in
few ways, and many ranks need the same: whatever is the same is worked out once.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from contextlib import contextmanager
from itertools import chain
from operator import add, attrgetter
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.plan.buckets import plan_buckets
from offbeat_ckptsync.plan.manifest import make_manifest
from offbeat_ckptsync.plan.slices import key_of, touches, where_of
from offbeat_ckptsync.values import Cell, TensorSpec
from offbeat_ckptsync.wire import encode

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from offbeat_ckptsync.plan.slices import Block, PlainCuts
    from offbeat_ckptsync.values import Layout, Manifest, SyncOffer

Layouts = dict[str, dict[int, "Layout"]]
"""By member and rank. A member that is not here takes everything."""

_SHOWN = 8
_AT_A_TIME = 4096  # tensors looked at in one go, so that other threads get their turn
_KEPT = 4  # cuts that are remembered: of all members, and of those that catch up

_FIELDS = attrgetter("dim", "start", "length")


def cut_offer(offer: SyncOffer, layouts: Layouts, like: SyncOffer | None = None) -> SyncOffer:
    """Return `offer` cut for these ranks, or as it is where nobody needs less than everything.

    `like` is an offer of the same tensors whose cut is to be used again, so that its label is reached once more; ranks
    whose borders are others then get every cell they touch. Tens of thousands of tensors for tens of ranks take a second or
    two the first time: call it beside an event loop.

    Raises:
        ManifestError: a layout does not fit the tensors, or the ranks of a member leave elements out; with names.
    """
    manifest = offer.manifest
    if like is not None:
        if like.whole is None or like.whole.digest != manifest.digest:
            return offer
        cut, cells = like.manifest, like.cells
        audiences = _Ranks(manifest, layouts).audiences_of(cut, cells) if layouts else {}
    elif all(not layout for ranks in layouts.values() for layout in ranks.values()):
        return offer
    else:
        cut, cells, audiences = _cut_once(manifest, layouts)
    return dataclasses.replace(offer, manifest=cut, whole=manifest, cells=cells, audiences=dict(audiences))


def prepared(offer: SyncOffer) -> SyncOffer:
    """Return `offer` with what else takes long worked out; whoever asks for it next finds it."""
    with _uncollected():
        plan_buckets(offer.manifest, offer.bucket_bytes)
        encode(offer)
    return offer


_Cut = tuple["Manifest", tuple[Cell, ...], dict[str, tuple[int, ...]]]
_done: list[tuple[str, Layouts, _Cut]] = []


def _cut_once(manifest: Manifest, layouts: Layouts) -> _Cut:
    """Return what `_Ranks.cut` does, from memory where these ranks needed the same of the same tensors before."""
    for digest, known, result in [*_done]:
        if digest == manifest.digest and known == layouts:
            return result
    with _uncollected():
        ranks = _Ranks(manifest, layouts)
        result = ranks.cut()
        ranks.forget()
    _done.append((manifest.digest, {member: dict(of) for member, of in layouts.items()}, result))
    del _done[:-_KEPT]
    return result


@contextmanager
def _uncollected() -> Generator[None]:
    """Put off garbage collection: all that is made inside lives on, and each look at it would hold up every thread."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Ranks:
    """The ranks of a sync and its tensors: ranks that need the same are one need, tensors that are cut alike one kind."""

    def __init__(self, manifest: Manifest, layouts: Layouts) -> None:
        """Compare everything; raises `ManifestError` where it does not fit together."""
        self._manifest = manifest
        self._needs: list[dict[str, PlainCuts]] = []
        self._keys: list[list[str]] = []  # of each need: the ranks that have it, as `audiences` names them
        self._who: list[str] = []  # of each need: a rank that has it, in words
        self._members: dict[frozenset[int], str] = {}  # the needs of its ranks: a member that has them
        self._add(layouts)
        self._kinds: dict[_Kind, int] = {}
        self._kind_of = self._sort()
        self._check_cuts()
        for numbers, member in self._members.items():
            self._check_covers(member, sorted(numbers))

    def cut(self) -> _Cut:
        """Return the cut manifest, where its tensors lie, and which parts each rank gets."""
        parts: dict[frozenset[int], int] = {}  # by the needs that touch it
        cells_of_kind: list[list[tuple[str, tuple[int, ...], tuple[int, ...], int]]] = []
        for shape, ways in self._kinds:
            cells_of_kind.append([])
            for block in _grid(shape, ways):
                audience = frozenset(n for n, cuts in enumerate(ways) if touches(shape, cuts, block))
                part = parts.setdefault(audience, len(parts))
                size = tuple(b - a for a, b in zip(*block, strict=True))
                cells_of_kind[-1].append((where_of(*block), size, block[0], part))
        specs: list[TensorSpec] = []
        cells: list[Cell] = []
        for index, (spec, kind) in enumerate(zip(self._manifest.specs, self._kind_of, strict=True)):
            name, dtype = spec.name, spec.dtype
            for where, shape, starts, part in cells_of_kind[kind]:
                specs.append(TensorSpec(name=name + where, shape=shape, dtype=dtype, part=part))
                cells.append(Cell(spec_index=index, starts=starts))
        got = [[part for each, part in parts.items() if n in each] for n in range(len(self._needs))]
        return make_manifest(specs), tuple(cells), self._by_rank(got)

    def audiences_of(self, cut: Manifest, cells: Sequence[Cell]) -> dict[str, tuple[int, ...]]:
        """Return which parts of a cut that was made for others each rank gets: those of which it needs anything."""
        kinds = list(self._kinds)
        got: list[set[int]] = [set() for _ in self._needs]
        seen: set[object] = set()
        for cell, piece in zip(cells, cut.specs, strict=True):
            kind = self._kind_of[cell.spec_index]
            key = (kind, cell.starts, piece.shape, piece.part)
            if key not in seen:
                seen.add(key)
                shape, ways = kinds[kind]
                block = (cell.starts, tuple(map(add, cell.starts, piece.shape)))
                for n, cuts in enumerate(ways):
                    if piece.part not in got[n] and touches(shape, cuts, block):
                        got[n].add(piece.part)
        return self._by_rank(got)

    def forget(self) -> None:
        """Let go of what was compared, bit by bit: freed at one go, millions of entries would hold up every thread."""
        while self._needs:
            self._needs.pop()

    def _by_rank(self, got: Sequence[Iterable[int]]) -> dict[str, tuple[int, ...]]:
        return {key: tuple(sorted(got[n])) for n, keys in enumerate(self._keys) for key in keys}

    def _add(self, layouts: Layouts) -> None:
        known: dict[object, int] = {}
        for member, ranks in layouts.items():
            numbers: set[int] = set()
            for rank, layout in ranks.items():
                # Built by C alone: there may be millions of cuts, most of them the same.
                flat = tuple(map(_FIELDS, chain.from_iterable(layout.values())))
                lengths = tuple(map(len, layout.values()))
                number = known.setdefault((tuple(layout), lengths, flat), len(self._needs))
                if number == len(self._needs):
                    rest = iter(flat)
                    cuts = (tuple(itertools.islice(rest, length)) for length in lengths)
                    self._needs.append(dict(zip(layout, cuts, strict=True)))
                    self._keys.append([])
                    self._who.append(f"rank {rank} of {member}")
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
                missing[kind] = [
                    where_of(*block)
                    for block in _grid(shape, ways)
                    if not any(touches(shape, cuts, block) for cuts in ways)
                ]
        if any(missing.values()):
            told = [
                spec.name + where
                for spec, kind in zip(self._manifest.specs, self._kind_of, strict=True)
                for where in missing.get(kind, ())
            ]
            more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
            raise ManifestError(f"the ranks of {member} leave out {', '.join(told[:_SHOWN])}{more}")


_Kind = tuple[tuple[int, ...], "tuple[PlainCuts | None, ...]"]
"""A shape, and how each need cuts it; None: needs all of it."""


def _grid(shape: tuple[int, ...], ways: Sequence[PlainCuts | None]) -> Iterator[Block]:
    """Yield the blocks into which the borders of all cuts divide a tensor; one without elements is one block."""
    if 0 in shape:
        yield (0,) * len(shape), shape
        return
    borders = [{0, size} for size in shape]
    for dim, start, length in chain.from_iterable(cuts or () for cuts in ways):
        borders[dim] |= {start, start + length}
    for block in itertools.product(*(itertools.pairwise(sorted(each)) for each in borders)):
        yield tuple(a for a, _ in block), tuple(b for _, b in block)


def _check_cuts(spec: TensorSpec, cuts: PlainCuts, who: str) -> None:
    if len({dim for dim, _, _ in cuts}) > 1:
        raise ManifestError(f"{who} cuts {spec.name!r} along several dimensions; cut along one")
    for dim, start, length in cuts:
        inside = 0 <= dim < len(spec.shape) and 0 <= start <= start + length
        if not inside or start + length > spec.shape[dim]:
            raise ManifestError(
                f"{who} needs elements {start} to {start + length} along dimension {dim} of {spec.name!r}, "
                f"whose shape is {spec.shape}"
            )
