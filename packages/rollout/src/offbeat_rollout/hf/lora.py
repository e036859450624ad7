"""Low-rank matrices in the Transformers adapter: merged into the weights when they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat_rollout.hf.model import check_given, dtype_name
from offbeat_rollout.lora import lora_layers, lora_specs, names_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel

    from offbeat_rollout.config import LoraConfig


class MergedLora:
    """Updates that bring A and B alone: W = base + alpha / rank * B @ A, computed in float32.

    Merged, it costs generation nothing, and in float32 the weights are those of a merged export bit for bit. The base
    weights under it are kept in host memory; every update starts from them, so errors do not add up.
    """

    def __init__(self, model: PreTrainedModel, lora: LoraConfig) -> None:
        """Lie over `model`, whose weights are the base.

        Raises:
            ConfigError: a target is no linear layer of the model.
        """
        self._layers = lora_layers(model, lora)
        self._rank = lora.rank
        self._scale = lora.alpha / lora.rank
        self._base = {
            name: layer.weight.detach().to("cpu", copy=True) for name, layer in self._layers.items()
        }

    def specs(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Return what an update must bring: A and B of every layer, under peft's names."""
        dtype = dtype_name(next(iter(self._base.values())))
        return lora_specs(self._layers, self._rank, dtype)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Check all, then merge all; raises `UpdateRefused` before anything changes."""
        given = check_given(self.specs(), tensors)
        with torch.no_grad():
            for name, layer in self._layers.items():
                live = layer.weight
                a, b = (given[each].to(live.device).float() for each in names_of(name))
                merged = self._base[name].to(live.device).float() + self._scale * (b @ a)
                live.copy_(merged)
