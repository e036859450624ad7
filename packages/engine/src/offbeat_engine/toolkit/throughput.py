"""What a step took of the machine: time, memory, and the share of the device's arithmetic (MFU)."""

# torch's memory statistics are typed in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field

import torch

# Dense bfloat16 operations per second by a part of the device's name, from NVIDIA's data sheets (SXM parts; those of
# other forms are slower and not listed). First match counts.
_PEAK_BFLOAT16 = {
    "H100 80GB HBM3": 989e12,
    "H200": 989e12,
    "A100-SXM": 312e12,
    "B200": 2250e12,
}
_KIB = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What arithmetic counts of a model: weights that tokens pass through, layers, and width of attention.

    Per token fed forward 2 N, and 4 N more for backward, with N `num_params`; attention adds per layer 4 T width forward
    and twice that backward, with T the sequence's length (arXiv 2204.02311, appendix B).
    """

    num_params: int
    num_layers: int
    attention_width: int

    def flops(self, num_tokens: int, num_pairs: int, *, backward: bool) -> float:
        """Return operations for `num_tokens` fed, of which `num_pairs` (sum of squared lengths) attend; all are needed ones.

        What is computed again under activation checkpointing does not count.
        """
        forward = (
            2.0 * self.num_params * num_tokens + 4.0 * self.num_layers * self.attention_width * num_pairs
        )
        return 3.0 * forward if backward else forward


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
