"""What an engine can do, declared before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Feature(StrEnum):
    """Things an engine may or may not support; the list that every engine answers. It may have others of its own."""

    PACKING = "packing"
    DYNAMIC_MICRO_BATCHES = "dynamic_micro_batches"
    ACTIVATION_CHECKPOINTING = "activation_checkpointing"
    BFLOAT16 = "bfloat16"
    VALUE_HEAD = "value_head"
    OFFLOAD = "offload"
    RESHARDING = "resharding"
    HUGGINGFACE_EXPORT = "huggingface_export"
    REMOTE_CHECKPOINTS = "remote_checkpoints"
    ACTIVATION_OFFLOAD = "activation_offload"
    LORA = "lora"
    FREEZING = "freezing"
    INFERENCE_ONLY = "inference_only"
    COMPILE = "compile"
    DETERMINISTIC = "deterministic"
    HYBRID_SHARDING = "hybrid_sharding"
    SEQUENCE_PARALLEL = "sequence_parallel"
    TENSOR_PARALLEL = "tensor_parallel"
    PIPELINE_PARALLEL = "pipeline_parallel"
    CONTEXT_PARALLEL = "context_parallel"
    EXPERT_PARALLEL = "expert_parallel"
    FP8 = "fp8"
    MULTIMODAL = "multimodal"
    ROUTED_EXPERTS = "routed_experts"
    NAMED_GRADIENTS = "named_gradients"
    TAKE_WEIGHTS = "take_weights"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One setting that this engine cannot honour: which, why, and what to do instead, unless the reason says it."""

    setting: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The declaration of one engine, checked when the config is read.

    `features` are supported and exercised by the conformance suite, those of the engine's own by the variants it brings
    along (`conformance(extra_variants=...)`). `missing` names each absent `Feature` with the reason, so that a refusal can be
    printed before anything starts. A feature that has a setting is asked for by the field of that name in the engine's
    `Config`.
    """

    engine: str
    devices: frozenset[str]
    features: frozenset[str]
    missing: Mapping[str, str]
    max_ranks: int | None = None
