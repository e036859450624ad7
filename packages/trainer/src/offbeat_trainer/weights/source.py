"""What a training engine exports, as the source of weight sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_ckptsync.member.sinks import specs_of
from offbeat_ckptsync.seams import WeightSource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch

    from offbeat_ckptsync import Manifest
    from offbeat_engine import Engine


class EngineWeights(WeightSource):
    """What a training engine exports."""

    # So an engine promises of `named_weights`, and nothing is trained while weights are sent.
    tensors_stay = True

    def __init__(self, engine: Engine) -> None:
        """Read from `engine`; every rank holds one of these."""
        self._engine = engine

    def manifest(self) -> Manifest:
        """Return the engine's manifest in ckptsync's terms."""
        return specs_of((spec.name, spec.shape, spec.dtype) for spec in self._engine.weight_manifest())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the engine's weights. A collective."""
        return self._engine.named_weights()

    def tensors_on(self, senders: Collection[int]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the engine's weights to those ranks alone. A collective."""
        return self._engine.named_weights_on(senders)
