"""The cells of a cut sync as a manifest, which is what is sent in place of whole tensors; and the pieces of buckets. Pure.

There are hundreds of thousands where a mixture of experts goes to tens of ranks, and tensors are cut in few ways: so each is
made when it is looked at, and what is asked of all of them at once comes as arrays. Objects for each, a garbage collector would
go through again and again, and hold up every thread meanwhile.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np
import xxhash

from offbeat_ckptsync.plan.manifest import dtype_of
from offbeat_ckptsync.values import Cell, Cutting, Manifest, Piece, SyncOffer, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_Item = TypeVar("_Item")


class _Made(Sequence[_Item]):
    """Items that are made when they are looked at."""

    @abstractmethod
    def item(self, place: int) -> _Item:
        """Make one, of which there is one."""

    @overload
    def __getitem__(self, index: int) -> _Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Item]: ...
    def __getitem__(self, index: int | slice) -> _Item | Sequence[_Item]:
        """Return one, or some."""
        places = range(len(self))[index]
        return self.item(places) if isinstance(places, int) else [self.item(place) for place in places]


class Pieces(_Made[Piece]):
    """The pieces of a bucket: a plan is asked for its buckets more often than for those."""

    def __init__(self, *columns: Ints) -> None:
        """Hold the four columns of `Piece`, each int64 [pieces]."""
        self._columns = columns

    def __len__(self) -> int:
        """Return their number."""
        return len(self._columns[0])

    def item(self, place: int) -> Piece:
        """Make one."""
        return Piece(*(int(column[place]) for column in self._columns))

    def __iter__(self) -> Iterator[Piece]:
        """Yield all."""
        return map(Piece, *(column.tolist() for column in self._columns))

    def __eq__(self, other: object) -> bool:
        """Say whether these are the same."""
        return isinstance(other, Pieces) and all(map(np.array_equal, self._columns, other._columns))

    __hash__ = None  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


class CellSpecs(_Made[TensorSpec]):
    """The specs of the cells of all tensors of a manifest, tensor by tensor."""

    def __init__(self, manifest: Manifest, cutting: Cutting) -> None:
        """Cut `manifest` as `cutting` says, which fits it."""
        self._manifest = manifest
        self._cutting = cutting
        self._kind_of = np.array(cutting.kind_of, dtype=np.int64)
        self._num_cells = np.array([len(kind) for kind in cutting.kinds], dtype=np.int64)
        self._ends = np.cumsum(self._num_cells[self._kind_of])  # of each tensor: the cells up to its last

    def __len__(self) -> int:
        """Return the number of cells."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def item(self, place: int) -> TensorSpec:
        """Make one."""
        tensor = int(np.searchsorted(self._ends, place, side="right"))
        cells = cells_of(self._cutting, tensor)
        return cell_spec(self._manifest.specs[tensor], cells[place - int(self._ends[tensor])])

    def __iter__(self) -> Iterator[TensorSpec]:
        """Yield the specs of all cells."""
        for index, spec in enumerate(self._manifest.specs):
            for cell in cells_of(self._cutting, index):
                yield cell_spec(spec, cell)

    def parts(self) -> Ints:
        """Return the part of each cell, int64 [cells]."""
        return self._of_each([cell.part for kind in self._cutting.kinds for cell in kind])

    def sizes(self) -> Ints:
        """Return the bytes of each cell, int64 [cells]."""
        numels = self._of_each([math.prod(cell.shape) for kind in self._cutting.kinds for cell in kind])
        widths = [dtype_of(spec.dtype).itemsize for spec in self._manifest.specs]
        return numels * np.repeat(np.array(widths, dtype=np.int64), self._num_cells[self._kind_of])

    def _of_each(self, of_kinds: list[int]) -> Ints:
        """Spread what is known of the cells of each kind, kind by kind, over the cells of all tensors."""
        counts = self._num_cells[self._kind_of]
        starts = np.cumsum(self._num_cells) - self._num_cells
        within = np.arange(len(self)) - np.repeat(self._ends - counts, counts)
        return np.array(of_kinds, dtype=np.int64)[np.repeat(starts[self._kind_of], counts) + within]


def sent_of(offer: SyncOffer) -> Manifest:
    """Return the manifest of what is sent of an offer: its tensors, or the cells they are cut into.

    The digest of the latter is the xxh3-128, in hex, of the canonical JSON of [digest of the tensors, kinds, kind_of].
    """
    return offer.manifest if offer.cutting is None else _sent(offer.manifest, offer.cutting)


@lru_cache(maxsize=4)  # asked for several times in a sync, and always for the same weights
def _sent(manifest: Manifest, cutting: Cutting) -> Manifest:
    text = json.dumps([manifest.digest, cutting.kinds, cutting.kind_of], separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return Manifest(specs=CellSpecs(manifest, cutting), digest=digest)


def cells_of(cutting: Cutting, tensor: int) -> tuple[Cell, ...]:
    """Return the cells of a tensor, by its place in the manifest."""
    return cutting.kinds[cutting.kind_of[tensor]]


def cell_spec(spec: TensorSpec, cell: Cell) -> TensorSpec:
    """Return what a cell of a tensor is called, and its shape and dtype."""
    return TensorSpec(name=spec.name + where_of(cell), shape=cell.shape, dtype=spec.dtype)


def where_of(cell: Cell) -> str:
    """Return what the name of a cell has behind its tensor's: where it lies."""
    return "[" + ",".join(f"{a}:{a + size}" for a, size in zip(cell.starts, cell.shape, strict=True)) + "]"
