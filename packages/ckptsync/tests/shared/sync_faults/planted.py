# pyright: basic
"""A source and a sink with a defect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.testing import DictSource

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from offbeat_ckptsync.values import Manifest


class LyingSource(DictSource):
    """Offers one manifest and yields other tensors: what a source with a defect does."""

    def __init__(self, weights: dict[str, torch.Tensor], offered: Manifest) -> None:
        super().__init__(weights)
        self._offered = offered

    def manifest(self) -> Manifest:
        """Return what it was told to pretend."""
        return self._offered


class TornSink(DictSink):
    """Fails in the middle of a load, once told to: what a replica that dies in the flip does."""

    fail = False

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load, or replace the first tensor only and fail."""
        if self.fail:
            name, tensor = next(iter(tensors))
            self.weights[name] = tensor.clone()
            raise OSError("planted: died in the flip")
        super().load(tensors, version)
