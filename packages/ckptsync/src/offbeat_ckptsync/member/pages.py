"""Mapped host memory that knows whether a tensor over it is still in use."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import mmap

    from numpy.typing import NDArray


class Pages:
    """The first `num_bytes` of a mapping."""

    def __init__(self, mapping: mmap.mmap, num_bytes: int) -> None:
        """Look at `mapping`; it lives as long as any array over it."""
        self._mapping = mapping
        self._num_bytes = num_bytes
        self._lent: weakref.ref[NDArray[np.uint8]] | None = None

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes, for a look that nobody needs to know of."""
        return np.frombuffer(self._mapping, dtype=np.uint8, count=self._num_bytes)

    def lend(self) -> NDArray[np.uint8]:
        """Return the bytes; the array lives as long as the storage of any tensor made from it."""
        array = None if self._lent is None else self._lent()
        if array is None:
            array = self.array()
            self._lent = weakref.ref(array)
        return array

    def is_lent(self) -> bool:
        """Say whether what was lent is still in use."""
        return self._lent is not None and self._lent() is not None
