"""What a step took of the machine: time, memory, and the share of the device's arithmetic (MFU)."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from typing import Any

import torch

# Dense bfloat16 operations per second by a part of the device's name, from NVIDIA's data sheets (SXM parts; those of
# other forms are slower and not listed). First match counts.
_PEAK_BFLOAT16 = {"H100 80GB HBM3": 989e12, "H200": 989e12, "A100-SXM": 312e12, "B200": 2250e12}
_KIB = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What arithmetic counts of a model: `num_params` weights that a token is multiplied with, and `num_trained` of them.

    Weights that are looked up are not among them, and of the experts of a mixture only as many as one token visits. Per token
    2 operations a weight forward, 2 backward, and 2 more for the gradient of a weight that is trained; attention adds per
    layer, and position that the causal mask leaves, 4 x `attention_width` forward and twice that backward (Chowdhery et al.
    2022, arXiv 2204.02311, appendix B).
    """

    num_params: int
    num_trained: int
    num_layers: int
    attention_width: int

    @classmethod
    def of(cls, hf: Any) -> ModelCost:
        """Read it off a whole Hugging Face model, whose frozen parameters want no gradient."""
        shape = hf.config.get_text_config()
        heads, head_dim = _number(shape, "num_attention_heads"), _number(shape, "head_dim")
        counted = _multiplied(hf, shape)
        return cls(
            num_params=round(sum(counted.values())),
            num_trained=round(sum(num for param, num in counted.items() if param.requires_grad)),
            num_layers=_number(shape, "num_hidden_layers") or 0,
            attention_width=heads * head_dim if heads and head_dim else shape.hidden_size,
        )

    def flops(self, num_tokens: int, num_pairs: int, *, backward: bool) -> float:
        """Return the operations that are needed for `num_tokens` fed, `num_pairs` being the sum of the squared lengths.

        What is computed again under activation checkpointing does not count.
        """
        forward = 2.0 * self.num_params * num_tokens
        attention = 2.0 * self.num_layers * self.attention_width * num_pairs  # half of the pairs, 4 each
        if not backward:
            return forward + attention
        return 2.0 * forward + 2.0 * self.num_trained * num_tokens + 3.0 * attention


def _multiplied(hf: Any, shape: Any) -> dict[torch.nn.Parameter, float]:
    """Return how many numbers of each parameter a token is multiplied with."""
    experts = _number(shape, "num_local_experts", "num_experts", "n_routed_experts")
    visited = (_number(shape, "num_experts_per_tok") or 1) / (experts or 1)
    head = hf.get_output_embeddings()
    table = hf.get_input_embeddings().weight
    looked_up = head is None or head.weight is not table  # a tied table is the head's, too
    return {
        param: param.numel() * (visited if ".experts." in name else 1.0)
        for name, param in hf.named_parameters()
        if not (looked_up and param is table)
    }


def _number(shape: Any, *names: str) -> int | None:
    """Return the first of these settings that the config has as one number; in some families layers differ in it."""
    for name in names:
        try:
            value = getattr(shape, name, None)
        except RuntimeError:  # transformers' word for one that layers differ in
            continue
        if isinstance(value, int):
            return value
    return None


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return what the device can do per second in `dtype`; None where that is not known (a CPU, an unlisted GPU)."""
    if device.type != "cuda" or dtype is not torch.bfloat16 or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_BFLOAT16.items() if part in name), None)


@dataclass(slots=True)
class Meter:
    """Begun with a step, read after it has ended on the device."""

    device: torch.device
    _started: float = field(default_factory=time.perf_counter, init=False)

    def __post_init__(self) -> None:
        """Count peak memory from here, where the device can."""
        if self.device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats(self.device)

    def elapsed_s(self) -> float:
        """Return seconds since the step began."""
        return time.perf_counter() - self._started

    def peak_bytes(self) -> int:
        """Return the most memory held at a time: of the device in this step, or on a CPU of the process so far."""
        if self.device.type == "cuda" and torch.cuda.is_available():
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
