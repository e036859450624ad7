"""Weights that are drawn where a folder's would be read: a folder is asked for its shape alone (`ModelConfig.random_init`)."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from offbeat_engine.toolkit.weight_files import Read


@dataclass(frozen=True, slots=True)
class DrawnWeights:
    """Stands for a folder's `WeightFiles`: normal with deviation `spread`, but ones for norms and zeros for biases.

    So the families that this engine knows begin in transformers, too, from other numbers. They follow from `seed` and each weight's name, so
    that every layout of ranks draws the same. A weight is drawn whole by each rank that reads of it.
    """

    shapes: dict[str, tuple[int, ...]]
    seed: int
    spread: float

    @contextmanager
    def opened(self, names: Iterable[str]) -> Generator[Read]:
        """Give a function as `WeightFiles.opened` does; what it has drawn it keeps until the end."""
        drawn = {name: self._draw(name) for name in names}

        def read(
            name: str, start: int = 0, stop: int | None = None, columns: slice | None = None
        ) -> torch.Tensor:
            return drawn[name][start:stop] if columns is None else drawn[name][start:stop, columns]

        yield read

    def _draw(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        draw = torch.Generator().manual_seed(self.seed + (zlib.crc32(name.encode()) << 20))
        return torch.empty(shape).normal_(0.0, self.spread, generator=draw)
