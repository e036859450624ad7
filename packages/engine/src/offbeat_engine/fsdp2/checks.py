"""What this engine can do, and why it cannot do the rest: read before anything starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.config import Capabilities, Feature, OptimizerName, Refusal
from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2 import families
from offbeat_engine.fsdp2.attention.varlen import missing_here, refusal
from offbeat_engine.fsdp2.memory.updater import has_torchao
from offbeat_engine.fsdp2.model.building import compiler_missing
from offbeat_engine.fsdp2.model.trainable import targets_of
from offbeat_engine.fsdp2.weights.loading import check_files, empty_model
from offbeat_engine.fsdp2.weights.lora import has_peft
from offbeat_engine.toolkit.collectives import first_failure
from offbeat_engine.toolkit.devices import device_refusals
from offbeat_engine.toolkit.step import schedules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.fsdp2.config import Fsdp2Config
    from offbeat_engine.toolkit.world import World

_MISSING: dict[str, str] = {
    Feature.TENSOR_PARALLEL: "weights are sharded over data-parallel ranks only",
    Feature.PIPELINE_PARALLEL: "every rank runs all layers",
    Feature.CONTEXT_PARALLEL: "keys and values of several ranks do not meet: those that share a sequence share out its heads "
    "(`sequence_parallel_size`)",
    Feature.EXPERT_PARALLEL: "experts are sharded as all weights are, and every rank computes those that its tokens choose",
    Feature.FP8: "it computes in float32 or bfloat16",
    Feature.MULTIMODAL: "a batch holds tokens alone, no images and no sound",
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


def refusals(config: Fsdp2Config, num_ranks: int, *, files: bool) -> list[Refusal]:
    """Return every reason why `config` cannot run on `num_ranks` ranks, all at once; `files`: in its weights' headers, too.

    Who asks may sit on a machine without a GPU: what a rank's own must have is looked at by `refusals_here`.
    """
    return [
        *_numbers(config, num_ranks),
        *_layout_of_ranks(config, num_ranks),
        *_recomputing(config),
        *_optimizer(config),
        *_attention(config),
        *_lora(config),
        *(_compiler(config) if config.device == "cpu" else ()),
        *_family(config, files=files),
    ]


def _family(config: Fsdp2Config, *, files: bool) -> Iterator[Refusal]:
    """Look at the model, and with `files` at the headers of its weights; code that comes with a model runs when it is built."""
    model, remedy = config.model, "give a folder that is whole, and that transformers can load"
    if model.trust_remote_code or not (Path(model.path) / "config.json").is_file():
        return
    try:
        hf = empty_model(model)
        yield from families.refusals(hf, config)
        if files:
            yield from _lora_targets(hf, config)
        if files and not model.random_init:
            check_files(hf, model)
    except ConfigError as error:
        yield Refusal(setting="model.path", reason=str(error), remedy=remedy)


def _lora_targets(hf: Any, config: Fsdp2Config) -> Iterator[Refusal]:
    try:
        if config.lora.rank > 0:
            targets_of(hf, config.lora.targets)
    except ConfigError as error:
        reason = str(error).removeprefix("`lora.targets`: ")
        yield Refusal("lora.targets", reason, "name linear layers of the model, or leave it empty for all")


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
    for setting, longest in (
        ("collective_timeout_s", "one rank may wait for another"),
        ("checkpoint_timeout_s", "a save with its copy, or a load, may take"),
    ):
        if getattr(config, setting) <= 0:
            yield Refusal(
                setting=setting,
                reason=f"must be positive, got {getattr(config, setting):g}",
                remedy=f"use the longest time {longest}",
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


def _recomputing(config: Fsdp2Config) -> Iterator[Refusal]:
    if config.checkpoint_keeps != "inputs" and not config.activation_checkpointing:
        yield Refusal(
            setting="checkpoint_keeps",
            reason="nothing is computed again in backward",
            remedy="set `activation_checkpointing: true`",
        )
    if config.compile and config.checkpoint_keeps == "products":
        yield Refusal(
            setting="checkpoint_keeps",
            reason="a compiled layer does not show its operators one by one",
            remedy='use "inputs", or set `compile: false`',
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
    yield from schedules.refusals(config.optimizer)
    if config.optimizer.name == OptimizerName.ADAMW_8BIT and not has_torchao():
        yield Refusal(
            setting="optimizer.name",
            reason="adamw_8bit needs the torchao package",
            remedy="install offbeat-engine[torchao], or use adamw",
        )


def _attention(config: Fsdp2Config) -> Iterator[Refusal]:
    found = refusal(config)
    if found is not None:
        yield Refusal("attention", *found)


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


def _compiler(config: Fsdp2Config) -> Iterator[Refusal]:
    missing = compiler_missing(config.device) if config.compile else None
    if missing is not None:
        yield Refusal(setting="compile", reason=missing, remedy="mend that, or set `compile: false`")


def require(config: Fsdp2Config, world: World, refused: list[Refusal]) -> None:
    """Hold that nothing is `refused`, and that each rank has what `config` needs: their machines may differ. A collective.

    Raises:
        ConfigError: with all reasons, the same on all ranks; where one lacks something it says which.
        StateError: there are other ranks, and `World.join` was not called.
    """
    if world.size > 1:
        world.ensure_group(config.collective_timeout_s)
    lacking = refused or refusals_here(config, world)
    failure = first_failure(world, ConfigError("; ".join(map(str, lacking))) if lacking else None)
    if failure is not None:
        raise ConfigError(failure.replace("ConfigError: ", "", 1))


def refusals_here(config: Fsdp2Config, world: World) -> list[Refusal]:
    """Return why this rank cannot run `config`: what `refusals` cannot know, which may be asked on another machine."""
    refused = device_refusals(config, world)
    return refused or (list(_gpu(config, world)) if config.device == "cuda" else [])


def _gpu(config: Fsdp2Config, world: World) -> Iterator[Refusal]:
    yield from _compiler(config)
    lack = missing_here(config, torch.cuda.get_device_capability(world.local_rank))
    if lack is not None:
        yield Refusal(setting="attention", reason=lack, remedy="set `attention: sdpa`")
    # Only cuBLAS reads it, once, when it starts: whoever launches the process must set it, so it is looked at here.
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")  # noqa: TID251
    if config.deterministic and workspace not in _WORKSPACES:
        yield Refusal(
            setting="deterministic",
            reason=f"cuBLAS needs CUBLAS_WORKSPACE_CONFIG to be one of {', '.join(_WORKSPACES)}, got {workspace}",
            remedy="set it in the environment that starts the ranks",
        )
