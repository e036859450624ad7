"""What this engine can do, and why it cannot do the rest: read before anything starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offbeat_engine.capabilities import Capabilities, Feature, Refusal
from offbeat_engine.config import Schedule
from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2 import families
from offbeat_engine.fsdp2.compilation import compiler_missing
from offbeat_engine.fsdp2.loading import empty_model
from offbeat_engine.fsdp2.lora import has_peft
from offbeat_engine.fsdp2.model import has_flash_attention, wants_flash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.fsdp2.config import Fsdp2Config

_MISSING = {
    Feature.TENSOR_PARALLEL: "weights are sharded over data-parallel ranks only",
    Feature.PIPELINE_PARALLEL: "every rank runs all layers",
}

# What cuBLAS documents as giving the same bits on every run.
_WORKSPACES = (":4096:8", ":16:8")


def capabilities() -> Capabilities:
    """Return the declaration of the FSDP2 engine, as it is installed here."""
    missing = dict(_MISSING)
    if not has_peft():
        missing[Feature.LORA] = "the peft package is not installed (pip install offbeat-engine[lora])"
    return Capabilities(
        engine="fsdp2",
        devices=frozenset({"cpu", "cuda"}),
        features=frozenset(set(Feature) - set(missing)),
        missing=missing,
    )


def refusals(config: Fsdp2Config, num_ranks: int) -> list[Refusal]:
    """Return every reason why `config` cannot run on `num_ranks` ranks, all at once."""
    return [
        *_numbers(config, num_ranks),
        *_layout_of_ranks(config, num_ranks),
        *_optimizer(config),
        *_device(config),
        *_lora(config),
        *_kernels(config),
        *_family(config),
    ]


def _family(config: Fsdp2Config) -> list[Refusal]:
    """Look at the model without its weights; code that comes with a model runs when it is built, and not before."""
    if config.model.trust_remote_code or not (Path(config.model.path) / "config.json").is_file():
        return []
    try:
        hf = empty_model(config.model)
    except ConfigError as error:
        return [
            Refusal(
                setting="model.path", reason=str(error), remedy="give a folder that transformers can load"
            )
        ]
    return list(families.refusals(hf, config))


def _numbers(config: Fsdp2Config, num_ranks: int) -> Iterator[Refusal]:
    if num_ranks < 1:
        yield Refusal(
            setting="num_ranks", reason=f"must be at least 1, got {num_ranks}", remedy="use 1 or more"
        )
    if config.micro_batch_tokens < 1:
        yield Refusal(
            setting="micro_batch_tokens",
            reason=f"must be at least 1, got {config.micro_batch_tokens}",
            remedy="use a few times the longest sequence",
        )
    if config.collective_timeout_s <= 0:
        yield Refusal(
            setting="collective_timeout_s",
            reason=f"must be positive, got {config.collective_timeout_s:g}",
            remedy="use the longest time one rank may wait for another",
        )


def _layout_of_ranks(config: Fsdp2Config, num_ranks: int) -> Iterator[Refusal]:
    peers = config.sequence_parallel_size
    if peers < 1 or num_ranks % peers:
        yield Refusal(
            setting="sequence_parallel_size",
            reason=f"must divide the number of ranks, {num_ranks}, got {peers}",
            remedy="use 1 or another divisor",
        )
    elif peers > 1:
        yield from _sequence_parallel(config)
    if config.shard_size < 0 or (config.shard_size and num_ranks % config.shard_size):
        yield Refusal(
            setting="shard_size",
            reason=f"must divide the number of ranks, {num_ranks}, got {config.shard_size}",
            remedy="use 0 for one copy of the weights over all ranks, or a divisor",
        )


def _sequence_parallel(config: Fsdp2Config) -> Iterator[Refusal]:
    if not config.packing:
        yield Refusal(
            setting="sequence_parallel_size",
            reason="only packed rows are cut among ranks, padded ones would share out their padding",
            remedy="set `packing: true`",
        )
    num_heads = _num_heads(config.model.path)
    if num_heads is not None and num_heads % config.sequence_parallel_size:
        yield Refusal(
            setting="sequence_parallel_size",
            reason=f"must divide the {num_heads} attention heads of the model, got {config.sequence_parallel_size}",
            remedy="use a divisor of both the heads and the ranks",
        )


def _num_heads(path: str) -> int | None:
    """Return how many query heads the model has, or None where its folder does not say (then building it tells)."""
    try:
        shape = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    heads = shape.get("text_config", shape).get("num_attention_heads")
    return heads if isinstance(heads, int) else None


def _optimizer(config: Fsdp2Config) -> Iterator[Refusal]:
    optimizer = config.optimizer
    if optimizer.lr < 0:
        yield Refusal(
            setting="optimizer.lr", reason=f"must not be negative, got {optimizer.lr:g}", remedy="use >= 0"
        )
    for name in ("beta1", "beta2"):
        beta = getattr(optimizer, name)
        if not 0 <= beta < 1:
            yield Refusal(
                setting=f"optimizer.{name}", reason=f"must lie in [0, 1), got {beta:g}", remedy="use 0.9"
            )
    if optimizer.schedule is not Schedule.CONSTANT and optimizer.total_steps <= optimizer.warmup_steps:
        yield Refusal(
            setting="optimizer.total_steps",
            reason=f"{optimizer.schedule} needs more than `warmup_steps` ({optimizer.warmup_steps}), "
            f"got {optimizer.total_steps}",
            remedy="give the number of optimizer steps of the run, or use the constant schedule",
        )


def _device(config: Fsdp2Config) -> Iterator[Refusal]:
    if config.device == "cuda" and not torch.cuda.is_available():
        yield Refusal(setting="device", reason="this process sees no CUDA device", remedy="use cpu")
    if config.packing and config.attention == "eager":
        yield Refusal(
            setting="attention",
            reason="eager attention knows no packed rows",
            remedy="set `packing: false`, or use auto",
        )
    if not wants_flash(config):
        return
    if not has_flash_attention() or config.device != "cuda" or config.dtype != "bfloat16":
        yield Refusal(
            setting="attention",
            reason="flash_attention_2 needs the flash-attn package, a CUDA device and bfloat16",
            remedy="use auto",
        )


def _lora(config: Fsdp2Config) -> Iterator[Refusal]:
    lora = config.lora
    if lora.rank < 0:
        yield Refusal(
            setting="lora.rank", reason=f"must not be negative, got {lora.rank}", remedy="use 8, or 0"
        )
    if lora.rank <= 0:
        return
    if not has_peft():
        yield Refusal(
            setting="lora.rank",
            reason="adapters need the peft package",
            remedy="install offbeat-engine[lora]",
        )
    if config.inference_only:
        yield Refusal(
            setting="inference_only",
            reason="adapters are there to be trained",
            remedy="leave `lora.rank` at 0, or use `base_mode` of the engine that trains them",
        )
    if not 0 <= lora.dropout < 1:
        yield Refusal(
            setting="lora.dropout", reason=f"must lie in [0, 1), got {lora.dropout:g}", remedy="use 0"
        )
    if lora.alpha <= 0:
        yield Refusal(
            setting="lora.alpha", reason=f"must be positive, got {lora.alpha:g}", remedy="use twice the rank"
        )
    if config.freeze:
        yield Refusal(
            setting="freeze",
            reason="with adapters the whole base is frozen already",
            remedy="leave `freeze` empty, or narrow `lora.targets`",
        )


def _kernels(config: Fsdp2Config) -> Iterator[Refusal]:
    missing = compiler_missing(config.device) if config.compile else None
    if missing is not None:
        yield Refusal(setting="compile", reason=missing, remedy="install it, or set `compile: false`")
    if not config.deterministic:
        return
    # Only cuBLAS reads it, once, when it starts: whoever launches the process must set it, so it is looked at here.
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")  # noqa: TID251
    if config.device == "cuda" and workspace not in _WORKSPACES:
        yield Refusal(
            setting="deterministic",
            reason=f"cuBLAS needs CUBLAS_WORKSPACE_CONFIG to be one of {', '.join(_WORKSPACES)}, got {workspace}",
            remedy="set it in the environment that starts the ranks",
        )
    if wants_flash(config) and not config.packing:
        yield Refusal(
            setting="deterministic",
            reason="flash-attention on padded rows does not hear of it",
            remedy="set `packing: true`, or `attention: sdpa`",
        )
