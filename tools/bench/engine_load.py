"""Host memory of a rank while it loads a model of more than a gigabyte, and sends it on, beside what it must hold."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import json
import time
from typing import TYPE_CHECKING, Any

import torch
from engine_peaks import MIB, Peak

from offbeat_engine import Fsdp2Config, ModelConfig, engine_class
from offbeat_engine.megatron import MegatronConfig
from offbeat_engine.testing import make_tiny_model, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_engine import World

NUM_RANKS = 2
# Qwen2's shape, untied: 0.57 B parameters, 1.1 GB in bfloat16 and 2.3 GB in float32.
HIDDEN, INTERMEDIATE, HEADS = 1024, 4096, 16
LAYERS, VOCAB, FILE_BYTES = 30, 32_768, 400 << 20
_M_MMAP_THRESHOLD = -3  # of malloc.h


def loading(folder: Path, name: str, scale: int = 1) -> dict[str, Any]:
    """Return the figures of `tools/bench/engine.py`: the worst rank's peak over its shard and the largest tensor.

    Export: every weight goes by on rank 0, whole, one after the other, and what is above the shard counts beside it.
    """
    model, numels = make_large_model(folder / "large", max(1, LAYERS // scale), scale)
    small = make_tiny_model(folder / "small")
    parts = run_ranks(_load, NUM_RANKS, name, small, model, timeout_s=900.0)
    whole = run_ranks(_load_whole, 1, small, model, timeout_s=900.0)[0]
    shard_mib = sum(numels) / NUM_RANKS * 4 / MIB
    must_mib = shard_mib + max(numels) * 4 / MIB
    export_mib = max(part["export_mib"] for part in parts)
    return {
        "load_peak_ratio": max(part["peak_mib"] for part in parts) / must_mib,
        "engine_export_peak_ratio": (shard_mib + export_mib) / must_mib,
        "engine_export_above_mib": export_mib,
        "load_peak_mib": max(part["peak_mib"] for part in parts),
        "load_must_mib": must_mib,
        "load_whole_peak_mib": whole["peak_mib"],
        "load_files_mib": sum(numels) * 2 / MIB,
        "load_seconds": max(part["seconds"] for part in parts),
        "load_whole_seconds": whole["seconds"],
    }


def make_large_model(folder: Path, layers: int, scale: int = 1) -> tuple[str, list[int]]:
    """Write random bfloat16 weights in several files; return the folder and how many numbers each tensor has."""
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=HIDDEN // scale,
        intermediate_size=INTERMEDIATE // scale,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_hidden_layers=layers,
        vocab_size=VOCAB // scale,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        shapes = {name: param.shape for name, param in Qwen2ForCausalLM(config).named_parameters()}
    folder.mkdir()
    config.save_pretrained(folder)
    draw, held, index = torch.Generator().manual_seed(0), {}, {}
    for number, (name, shape) in enumerate(shapes.items(), start=1):
        held[name] = torch.randn(shape, generator=draw).mul_(0.02).bfloat16()
        if sum(tensor.nbytes for tensor in held.values()) > FILE_BYTES or number == len(shapes):
            file = f"model-{number:05}.safetensors"
            save_file(held, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(held, file)
            held = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return str(folder), [shape.numel() for shape in shapes.values()]


def give_back() -> None:
    """Let glibc return freed tensors at once, as `offbeat_trainer` tells a rank on a CPU to for as long as it loads.

    It keeps blocks of up to 32 MiB for later, and now and then as much again as the model.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)


def _load(world: World, name: str, small: str, model: str) -> dict[str, float]:
    give_back()
    engine_of(world, small, name)  # libraries and process groups are there before we look
    peak = Peak("cpu")
    started = time.perf_counter()
    engine = engine_of(world, model, name)
    figures = {"peak_mib": peak.mib(), "seconds": time.perf_counter() - started}
    peak = Peak("cpu")
    for _ in engine.named_weights_on((0,)):
        pass
    figures["export_mib"] = peak.mib()
    engine.close()
    return figures


def _load_whole(world: World, small: str, model: str) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    give_back()
    AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    peak = Peak(world.device)
    started = time.perf_counter()
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert hf.dtype is torch.float32
    return {"peak_mib": peak.mib(), "seconds": time.perf_counter() - started}


def engine_of(world: World, model: str, name: str = "fsdp2") -> Any:  # noqa: ANN401
    """Return an engine on `model` with its defaults; megatron-core's ranks share every tensor."""
    chosen = ModelConfig(path=model)
    config = (
        Fsdp2Config(model=chosen)
        if name == "fsdp2"
        else MegatronConfig(model=chosen, tensor_parallel_size=world.size)
    )
    engine = engine_class(name)(config, world)
    engine.init_model()
    return engine
