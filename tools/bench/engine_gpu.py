"""A model of about 1.5 B parameters on one GPU: how much of the device becomes training, beside a plain PyTorch loop."""

# transformers is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from engine_loops import Plain, batch_of, engine_on, make_model, take_turns

from offbeat_engine import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_loops import Side, Size

    from offbeat_engine import TrainBatch

_Side = TypeVar("_Side", bound="Side")
SEQUENCE_TOKENS = 1024  # of each sequence: four share a packed row
MICRO_BATCHES = 4  # of a step, so that the optimizer's step weighs as in training
WARM_UP = 2
GIB = 1 << 30
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 operations per second by a part of the device's name (NVIDIA's data sheets, SXM modules)."""


def measure(size: Size) -> dict[str, Any]:
    """Return tokens/s and peak memory of both sides on the device of `size`, and `mfu` where the device's peak is known.

    A step trains `MICRO_BATCHES` times `size.micro_batch_tokens` tokens.
    """
    lengths = [SEQUENCE_TOKENS] * (MICRO_BATCHES * size.micro_batch_tokens // SEQUENCE_TOKENS)
    batch = batch_of(size, lengths)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "large", size)
        engine, ours_gib = _with_peak(lambda: engine_on(World(device=size.device), model, size), batch)
        plain, theirs_gib = _with_peak(lambda: Plain(model, size), batch)
    turns = take_turns(engine, plain, batch, size.rounds)
    flops = flops_per_token(plain.model, SEQUENCE_TOKENS)
    peak = peak_flops()
    return {
        "mfu": None if peak is None else turns.ours * flops / peak,
        "mfu_plain": None if peak is None else turns.theirs * flops / peak,
        "large_tokens_per_s": turns.ours,
        "large_plain_tokens_per_s": turns.theirs,
        "large_ratio": turns.ratio,
        "large_peak_gib": ours_gib,
        "large_plain_peak_gib": theirs_gib,
        "large_parameters": sum(each.numel() for each in plain.model.parameters()),
        "device": device_name(),
    }


def flops_per_token(model: Any, tokens: int) -> float:  # noqa: ANN401
    """Return the operations of forward and backward for one token of a causal sequence of `tokens`.

    6 per weight that is multiplied with, and 12 per layer, hidden unit and position attended to, of which a causal mask
    leaves half (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). What is computed twice counts once.
    """
    config = model.config
    looked_up = model.get_input_embeddings().weight.numel()
    multiplied = sum(each.numel() for each in model.parameters()) - looked_up
    return 6.0 * multiplied + 12.0 * config.num_hidden_layers * config.hidden_size * tokens / 2


def device_name() -> str:
    """Return the name of the GPU, or "cpu" where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def peak_flops() -> float | None:
    """Return what the device can do at best, or None where that is not known."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name()), None)


def _with_peak(make: Callable[[], _Side], batch: TrainBatch) -> tuple[_Side, float | None]:
    """Return a side after `WARM_UP` steps, and the GiB of the device that it took at most, from its making on."""
    if not torch.cuda.is_available():
        return make(), None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    side = make()
    for _ in range(WARM_UP):
        side.step(batch)
    torch.cuda.synchronize()
    return side, (torch.cuda.max_memory_allocated() - before) / GIB
