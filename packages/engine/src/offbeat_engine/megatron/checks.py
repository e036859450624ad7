"""What this engine can do, and why it cannot do the rest: read before anything starts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_engine.config import Capabilities, Feature, OptimizerName, Refusal
from offbeat_engine.errors import ConfigError
from offbeat_engine.megatron import families
from offbeat_engine.megatron.config import library_refusals
from offbeat_engine.megatron.families import Among, vocab_rows
from offbeat_engine.megatron.layers import transformer_engine
from offbeat_engine.megatron.loading import check_files, hf_config
from offbeat_engine.toolkit.hf import probing
from offbeat_engine.toolkit.step import schedules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.megatron.config import MegatronConfig
    from offbeat_engine.megatron.families import Shape

TENSOR_SEQUENCE = "tensor_sequence_parallel"
"""A feature of this engine's own: `sequence_parallel` beside `tensor_parallel_size`."""

_NOT_YET = "is not written for this engine yet"
_MISSING: dict[str, str] = {
    Feature.OFFLOAD: f"offloading {_NOT_YET}",
    Feature.ACTIVATION_OFFLOAD: f"keeping activations in host memory {_NOT_YET}",
    Feature.LORA: f"megatron-core has no adapters of its own, and training them {_NOT_YET}",
    Feature.COMPILE: "its layers are not compiled",
    Feature.DETERMINISTIC: "its kernels are not held to the same bits",
    Feature.HYBRID_SHARDING: "weights are cut by tensor and pipeline, and every other rank has a copy",
    Feature.SEQUENCE_PARALLEL: "ranks share the tokens of a sequence only beside a tensor's (`sequence_parallel`)",
    Feature.FP8: "products in eight bits are Transformer Engine's (`transformer_engine`), on GPUs: written, run by nobody yet and so not declared",
    Feature.TOP_TOKENS: f"naming the likeliest tokens of a distribution {_NOT_YET}",
    Feature.TAKE_WEIGHTS: f"taking another engine's weights over {_NOT_YET}",
    Feature.MULTIMODAL: "a batch holds tokens alone, no images and no sound",
}


def has_megatron() -> bool:
    """Return whether megatron-core is installed."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def capabilities() -> Capabilities:
    """Return the declaration of the Megatron engine."""
    return Capabilities(
        engine="megatron",
        devices=frozenset({"cpu", "cuda"}),
        features=frozenset(set(Feature) - set(_MISSING)) | {TENSOR_SEQUENCE},
        missing=_MISSING,
    )


def refusals(config: MegatronConfig, num_ranks: int) -> list[Refusal]:
    """Return every reason why `config` cannot run on `num_ranks` ranks, all at once."""
    return [
        *_installed(),
        *_numbers(config),
        *_layout(config, num_ranks),
        *_asked_for(config),
        *schedules.refusals(config.optimizer),
        *transformer_engine.refusals(config),
        *library_refusals(config),
        *_model(config),
    ]


def _installed() -> Iterator[Refusal]:
    if not has_megatron():
        yield Refusal(
            setting="engine",
            reason="megatron-core is not installed",
            remedy="install offbeat-engine[megatron]",
        )


def _numbers(config: MegatronConfig) -> Iterator[Refusal]:
    for name in ("micro_batch_tokens", "collective_timeout_s", "checkpoint_timeout_s"):
        if getattr(config, name) <= 0:
            yield Refusal(
                setting=name,
                reason=f"must be more than 0, got {getattr(config, name):g}",
                remedy="use 1 or more",
            )


def _layout(config: MegatronConfig, num_ranks: int) -> Iterator[Refusal]:
    replica = config.model_parallel_size
    # Ranks that share sequences are copies, too.
    num_copies = num_ranks * config.context_parallel_size // replica
    if num_ranks < 1 or num_ranks % replica:
        yield Refusal(
            setting="num_ranks",
            reason=f"{num_ranks} ranks are no multiple of the {replica} that hold one copy (tensor x pipeline x context)",
            remedy="use a multiple of them",
        )
    elif (num_ranks // config.pipeline_parallel_size) % (
        config.expert_parallel_size * config.tensor_parallel_size
    ):
        yield Refusal(
            setting="expert_parallel_size",
            reason=f"{config.expert_parallel_size} copies are to share the experts, and there are {num_copies}",
            remedy="use a divisor of them",
        )
    if config.virtual_pipeline_size > 1 and config.pipeline_parallel_size == 1:
        yield Refusal(
            setting="virtual_pipeline_size",
            reason="there is no pipeline to interleave",
            remedy="set `pipeline_parallel_size` to 2 or more",
        )
    if config.sequence_parallel and config.tensor_parallel_size == 1:
        yield Refusal(
            setting="sequence_parallel",
            reason="only the ranks of a tensor share tokens",
            remedy="set `tensor_parallel_size` to 2 or more",
        )


def _experts(config: MegatronConfig, shape: Shape) -> Iterator[Refusal]:
    """Refuse what a mixture cannot be trained with."""
    if shape.experts_per_token == 1 and shape.normalized_router:
        yield Refusal(
            setting="model.path",
            reason="the model normalises the weights of one expert per token, which megatron-core does not compute",
            remedy="use the engine `fsdp2`",
        )
    if config.tensor_parallel_size == 1:
        return
    if config.device == "cpu" and config.dispatcher == "alltoall":
        yield Refusal(
            setting="dispatcher",
            reason="experts that are cut like tensors gather what came to each rank, and gloo gathers equal shares alone",
            remedy="use `allgather` on a CPU",
        )
    if not config.sequence_parallel and not config.inference_only:
        yield Refusal(
            setting="sequence_parallel",
            reason="megatron-core trains experts that are cut like tensors with it alone",
            remedy="set it to true",
        )


def _asked_for(config: MegatronConfig) -> Iterator[Refusal]:
    asked = {
        "offload_parameters": (Feature.OFFLOAD, config.offload_parameters),
        "offload_optimizer": (Feature.OFFLOAD, config.offload_optimizer),
        "lora": (Feature.LORA, config.lora.rank > 0),
        "deterministic": (Feature.DETERMINISTIC, config.deterministic),
    }
    for setting, (feature, is_asked) in asked.items():
        if is_asked:
            yield _missing(setting, feature, "use the engine `fsdp2`, or leave it as it is")
    if config.optimizer.name not in (OptimizerName.ADAMW, OptimizerName.ADAFACTOR):  # that one no engine has
        yield Refusal(
            "optimizer.name",
            "this engine has AdamW with float32 moments alone",
            "set it to adamw, or use `fsdp2`",
        )
    model = config.model
    for setting, is_asked in (
        ("model.trust_remote_code", model.trust_remote_code),
        ("model.dropout", model.dropout),
    ):
        if is_asked:
            yield Refusal(
                setting=setting,
                reason="this engine has layers of its own, and drops nothing out",
                remedy="set it to false",
            )


def _missing(setting: str, feature: Feature, remedy: str) -> Refusal:
    return Refusal(setting=setting, reason=_MISSING[feature], remedy=remedy)


def _model(config: MegatronConfig) -> Iterator[Refusal]:
    if not (Path(config.model.path) / "config.json").is_file() or config.model.trust_remote_code:
        return
    try:
        found = hf_config(config.model)
    except ConfigError as error:
        yield Refusal(
            setting="model.path", reason=str(error), remedy="give a folder that transformers can load"
        )
        return
    refused = families.refusals(found)
    yield from refused
    if refused:
        return
    yield from probing.refusals(found, config.max_sequence_tokens)
    shape = families.shape_of(found, config.model.head)
    yield from _divided(config, shape)
    yield from transformer_engine.size_refusals(config, shape)
    if shape.num_experts:
        yield from _experts(config, shape)
    try:
        if not config.model.random_init:
            check_files(config.model, shape)
    except ConfigError as error:
        yield Refusal(setting="model.path", reason=str(error), remedy="give a folder that is whole")


def _divided(config: MegatronConfig, shape: Shape) -> Iterator[Refusal]:
    """Refuse numbers of the model that do not come out even."""
    tensor, stages = config.tensor_parallel_size, config.pipeline_parallel_size * config.virtual_pipeline_size
    for setting, size, what, number in (
        ("tensor_parallel_size", tensor, "key-value heads", shape.num_groups),
        ("tensor_parallel_size", tensor, "attention heads", shape.num_heads),
        ("tensor_parallel_size", tensor, "inner dimensions of an MLP", shape.ffn),
        ("pipeline_parallel_size", stages, "layers", shape.num_layers),
        ("expert_parallel_size", config.expert_parallel_size, "experts", shape.num_experts),
    ):
        if number % size or (setting.startswith("expert") and size > 1 and not number):
            yield Refusal(
                setting=setting,
                reason=f"the model has {number} {what}, which {size} do not divide",
                remedy="use a divisor",
            )
    if not vocab_rows(shape.vocab, Among(tensor - 1, tensor))[1]:
        yield Refusal(
            setting="tensor_parallel_size",
            reason=f"the last of {tensor} ranks would have none of the model's {shape.vocab} tokens",
            remedy="use fewer ranks",
        )
