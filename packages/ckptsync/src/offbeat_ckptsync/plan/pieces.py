"""The pieces of a bucket, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from offbeat_ckptsync.values import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


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
