"""What `gpu.py` measures, one function a part, each called in a process of its own; answers are JSON's values."""

# transformers is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from engine_loops import EngineSide, Plain, Size, batch_of, engine_on, seconds_of, take_turns

from offbeat_engine import LoraConfig, World
from offbeat_engine.toolkit.step.throughput import ModelCost, peak_flops

if TYPE_CHECKING:
    from collections.abc import Callable

SEQUENCE_TOKENS = 1024  # of each sequence: four share a packed row
MICRO_BATCHES = 4  # of a step, so that the optimizer's step weighs as in training
WARM_UP = 2
GIB = 1 << 30
LORA_RANK = 16

SMALL = Size(
    hidden=1536, layers=28, intermediate=8960, heads=12, vocab=151_936, micro_batch_tokens=4096, dtype="bfloat16",
    device="cuda", rounds=5,
)  # fmt: skip
LARGE = replace(SMALL, hidden=3584, layers=28, intermediate=18_944, heads=28, vocab=152_064)


def train_small(
    size: Size = SMALL,
    micro_batches: int = MICRO_BATCHES,
    **settings: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Train everything of about 1.5 B parameters with AdamW, float32 master weights, beside a plain loop; `settings` are the engine's."""
    lengths = [SEQUENCE_TOKENS] * (micro_batches * size.micro_batch_tokens // SEQUENCE_TOKENS)
    batch = batch_of(size, lengths)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "model", size)
        engine, ours_gib = _with_peak(
            lambda: engine_on(World(device=size.device), model, size, **settings), batch
        )
        plain, theirs_gib = _with_peak(lambda: Plain(model, size), batch)
    turns = take_turns(engine, plain, batch, size.rounds)
    flops = flops_per_token(ModelCost.of(plain.model))
    peak = peak_flops(torch.device(size.device), torch.bfloat16)
    return {
        "trained": "all weights, AdamW, float32 master weights and moments",
        "micro_batch_tokens": size.micro_batch_tokens,
        "parameters": sum(each.numel() for each in plain.model.parameters()),
        "mfu": None if peak is None else turns.ours * flops / peak,
        "mfu_plain": None if peak is None else turns.theirs * flops / peak,
        "tokens_per_s": turns.ours,
        "plain_tokens_per_s": turns.theirs,
        "ratio": turns.ratio,
        "peak_gib": ours_gib,
        "plain_peak_gib": theirs_gib,
    }


def train_large(size: Size = LARGE) -> dict[str, Any]:
    """Train adapters on about 7 B frozen parameters: all of it, at 16 bytes a parameter, takes more than one GPU."""
    batch = batch_of(size, [SEQUENCE_TOKENS] * (MICRO_BATCHES * size.micro_batch_tokens // SEQUENCE_TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "model", size)
        lora = LoraConfig(rank=LORA_RANK, alpha=2.0 * LORA_RANK)
        settings = {"lora": lora, "activation_checkpointing": True}
        engine, peak_gib = _with_peak(
            lambda: engine_on(World(device=size.device), model, size, **settings), batch
        )
    cost = replace(cost_on_meta(size), num_trained=0)  # what adapters add does not count
    took = median(seconds_of(engine, batch) for _ in range(size.rounds))
    tokens_per_s = int(batch["lengths"].sum()) / took
    peak = peak_flops(torch.device(size.device), torch.bfloat16)
    return {
        "trained": f"adapters of rank {LORA_RANK} on frozen bfloat16 weights, with activation checkpointing",
        "parameters": cost.num_params + size.vocab * size.hidden,
        "mfu": None if peak is None else tokens_per_s * flops_per_token(cost) / peak,
        "tokens_per_s": tokens_per_s,
        "peak_gib": peak_gib,
    }


def train_megatron(size: Size | None = None) -> dict[str, Any]:
    """Train the same weights on the same batch with the Megatron engine and with FSDP2, in turns."""
    from engine_megatron import megatron_on

    size = replace(SMALL, layers=SMALL.layers // 2) if size is None else size  # both are in memory
    batch = batch_of(size, [SEQUENCE_TOKENS] * (MICRO_BATCHES * size.micro_batch_tokens // SEQUENCE_TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "model", size)
        sides = (megatron_on(model, size), engine_on(World(device=size.device), model, size))
    said = [_logprobs(side, batch) for side in sides]
    losses = [-float(row[batch["loss_mask"]].mean()) for row in said]
    apart = (said[0] - said[1]).abs()[batch["loss_mask"]]
    turns = take_turns(*sides, batch, size.rounds)
    cost = cost_on_meta(size)
    flops, peak = flops_per_token(cost), peak_flops(torch.device(size.device), torch.bfloat16)
    return {
        "trained": "all weights, AdamW, float32 master weights and moments",
        "parameters": cost.num_params + size.vocab * size.hidden,
        "transformer_engine": sides[0].engine._state.with_te,  # noqa: SLF001 nothing else says it
        "loss": losses[0],
        "mean_logprob_difference": float(apart.mean()),
        "max_logprob_difference": float(apart.max()),
        "loss_difference_relative": abs(losses[0] - losses[1]) / abs(losses[1]),
        "mfu": None if peak is None else turns.ours * flops / peak,
        "mfu_fsdp2": None if peak is None else turns.theirs * flops / peak,
        "tokens_per_s": turns.ours,
        "fsdp2_tokens_per_s": turns.theirs,
        "ratio": turns.ratio,
    }


def _logprobs(side: EngineSide, batch: Any) -> torch.Tensor:  # noqa: ANN401
    with side.engine.eval_mode():
        predictions, _ = side.engine.forward_backward_step(batch, forward_only=True)
    return predictions["logprobs"].cpu()


def random_model(folder: Path, size: Size) -> str:
    """Write a random model of `size`, drawn where it is trained and in the dtype in which it computes."""
    from transformers import Qwen2ForCausalLM

    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, size.dtype))
    try:
        with torch.device(size.device):
            model = Qwen2ForCausalLM(_config(size))
    finally:
        torch.set_default_dtype(dtype)
    model.save_pretrained(folder, max_shard_size="4GB")
    return str(folder)


def _config(size: Size) -> Any:  # noqa: ANN401
    from transformers import Qwen2Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    return Qwen2Config(
        hidden_size=size.hidden, num_hidden_layers=size.layers, intermediate_size=size.intermediate,
        num_attention_heads=size.heads, num_key_value_heads=max(1, size.heads // 6), vocab_size=size.vocab,
        tie_word_embeddings=False,
    )  # fmt: skip


def cost_on_meta(size: Size) -> ModelCost:
    """Return what a token costs in a model of `size`, all of it trained."""
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        return ModelCost.of(Qwen2ForCausalLM(_config(size)))


def flops_per_token(cost: ModelCost, tokens: int = SEQUENCE_TOKENS) -> float:
    """Return the operations of forward and backward for one token of a causal sequence of `tokens`."""
    return cost.flops(tokens, tokens**2, backward=True) / tokens


def _with_peak(make: Callable[[], Any], batch: Any) -> tuple[Any, float | None]:  # noqa: ANN401
    """Return a side after `WARM_UP` steps, and the GiB of the device that it took at most, from its making on."""
    on_gpu = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    side: EngineSide | Plain = make()
    for _ in range(WARM_UP):
        side.step(batch)
    if not on_gpu:
        return side, None
    torch.cuda.synchronize()
    return side, (torch.cuda.max_memory_allocated() - before) / GIB


def sync_cuda_ipc(num_bytes: int = 2 * GIB, num_tensors: int = 400, device: str = "cuda") -> dict[str, Any]:
    """Sync changed weights from one process to another on the same GPU, every byte compared at the end."""
    from timed_syncs import Load, measure

    from offbeat_ckptsync.toolkit.config import SyncConfig

    transport = "cuda_ipc" if device == "cuda" else "shm"
    load = Load(num_bytes=num_bytes, num_tensors=num_tensors, num_receivers=1, num_syncs=5, device=device)
    reports = measure(load, SyncConfig(transport=transport, bucket_mib=64.0))
    took = median(report.total_s for report in reports[1:])
    return {
        "transport": transport,
        "num_bytes": reports[0].num_bytes,
        "seconds": took,
        "first_s": reports[0].total_s,
        "gb_per_s": reports[0].num_bytes / took / 1e9,
    }


def grpo(size: Size | None = None, steps: int = 3) -> dict[str, Any]:
    """Make GRPO steps in one process: the Transformers adapter generates, the engine trains, weights are synced."""
    from grpo_local import GrpoRun

    size = replace(SMALL, hidden=768, layers=12, intermediate=3072, vocab=32_000) if size is None else size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(
            GrpoRun(model=random_model(folder / "model", size), size=size, steps=steps).run(folder / "run")
        )
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    last = {key: value for line in lines for key, value in line.items() if isinstance(value, int | float)}
    return {"steps": steps, "dtype": size.dtype, "metrics": last}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "train_1_5b": train_small,
    "train_1_5b_compiled": partial(train_small, compile=True),
    "train_1_5b_8k": partial(train_small, replace(SMALL, micro_batch_tokens=8192)),
    "train_7b": train_large,
    "train_megatron": train_megatron,
    "cuda_ipc": sync_cuda_ipc,
    "grpo": grpo,
}
