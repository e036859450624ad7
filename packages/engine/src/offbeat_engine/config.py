"""Settings of an engine, and what it can do, declared before anything starts.

Settings are frozen values of plain types, validated by whoever reads them from a file.
"""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeVar

from offbeat_engine.errors import ConfigError

SPEED: Mapping[str, object] = {"speed": True}
"""Metadata of a field, see `EngineConfig`."""


def bounded(
    default: float | None,
    *,
    at_least: float | None = None,
    more_than: float | None = None,
    at_most: float | None = None,
    speed: bool = False,
) -> Any:  # noqa: ANN401 what `field` answers is as the annotation beside it says
    """Return a field with limits in its metadata; whoever reads settings from a file or command line holds them.

    With `speed` it has `SPEED`, too. That is early and cheap; an engine's `check` looks at what depends on more than one setting.
    """
    limits = {"at_least": at_least, "more_than": more_than, "at_most": at_most}
    given = {key: limit for key, limit in limits.items() if limit is not None}
    return field(default=default, metadata={**given, **(SPEED if speed else {})})


class Dtype(StrEnum):
    """Compute precision. Master weights and optimizer state are float32 in both."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Schedule(StrEnum):
    """Shape of the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class NonFinite(StrEnum):
    """What to do when a loss or gradient norm is not finite: all ranks do the same."""

    STOP = "stop"
    SKIP = "skip"


class OptimizerName(StrEnum):
    """Which optimizer: `adamw_8bit` (by torchao) keeps its moments in eight bits; `adafactor` is refused, and was once there."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    ADAFACTOR = "adafactor"


class LoraExport(StrEnum):
    """What `named_weights` yields with LoRA: base weights with the adapter merged in, or the adapter alone."""

    MERGED = "merged"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) by peft; the base is frozen. `rank` 0 means none.

    `targets` are endings of module names; empty means every linear layer but the head.
    """

    rank: int = bounded(0, at_least=0)  # of the adapters, which alone are trained; 0: all weights are
    alpha: float = bounded(16.0, more_than=0)  # the product of the adapters is scaled by alpha / rank
    dropout: float = bounded(0.0, at_least=0, at_most=1)  # share of an adapter's inputs that is zeroed
    targets: tuple[str, ...] = ()
    export: LoraExport = LoraExport.MERGED


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model the engine trains.

    `path` is a local Hugging Face folder (config.json, tokenizer, safetensors). `random_init` takes only
    the shape from it and draws weights from `seed`. Dropout and router jitter that its config brings along are off unless
    `dropout`: with them the same weights answer differently in training.
    """

    path: str
    random_init: bool = False
    seed: int = 0
    head: Literal["lm", "value"] = "lm"
    trust_remote_code: bool = False  # whether Python code in the model's folder may run
    dropout: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """One optimizer on float32 master weights; `max_grad_norm` <= 0 turns clipping off."""

    name: OptimizerName = OptimizerName.ADAMW  # which optimizer
    lr: float = bounded(1e-6, at_least=0)  # learning rate
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = bounded(0.0, at_least=0)  # decoupled weight decay
    max_grad_norm: float = 1.0
    schedule: Schedule = Schedule.CONSTANT  # how the learning rate goes on after it has risen
    warmup_steps: int = bounded(0, at_least=0)  # optimizer steps in which the learning rate rises
    total_steps: int = field(default=0, metadata={"at_least": 0, "derived": "trainer.steps"})
    """needed by linear and cosine; 0 = unknown"""
    min_lr_ratio: float = 0.0  # where the schedule ends, as a share of `lr`


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What every training engine is told; an engine's own settings are fields of its own subclass (`Engine.Config`).

    An engine refuses in `check` what it cannot honour of these. A subclass is frozen and keyword-only too, and gives every
    field a default: recipes then read `engine.<field>` by it. A field with the metadata `SPEED` changes how fast a step is and
    where it is computed, and of its numbers no more than the rounding: a run may go on with another value.

    `micro_batch_tokens` is the budget of one micro-batch on one rank, in tokens after packing; a single longer
    sequence gets a micro-batch of its own. Ranks that share sequences put their budgets together. `max_sequence_tokens` is
    the longest sequence to come (0: not known): models that are exact only up to a length refuse more. `collective_timeout_s`
    bounds every wait for another rank, `checkpoint_timeout_s` a whole save (with its copy to a remote path) or load, in which
    rank 0 may work long alone. `freeze` are patterns (fnmatch) over Hugging Face weight names
    that are not trained. `inference_only` is for a model that is never trained (a reference, a judge): weights in the
    compute dtype, no master weights, optimizer or gradients; training calls are refused.
    `deterministic` asks for deterministic kernels and refuses others.
    """

    model: ModelConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dtype: Dtype = Dtype.FLOAT32
    device: Literal["cpu", "cuda"] = "cpu"
    micro_batch_tokens: int = bounded(16384, at_least=1, speed=True)
    max_sequence_tokens: int = 0
    activation_checkpointing: bool = field(default=False, metadata=SPEED)
    """Backward computes layers again, which takes time and saves memory."""
    offload_parameters: bool = field(default=False, metadata=SPEED)
    """weights and gradients in host memory outside the modes"""
    offload_optimizer: bool = field(default=False, metadata=SPEED)
    """moments in host memory outside the optimizer's step"""
    lora: LoraConfig = field(default_factory=LoraConfig)
    freeze: tuple[str, ...] = ()
    inference_only: bool = False
    deterministic: bool = False
    on_nonfinite: NonFinite = NonFinite.STOP  # what follows a gradient that is not finite
    collective_timeout_s: float = field(default=600.0, metadata=SPEED)
    checkpoint_timeout_s: float = field(default=3600.0, metadata=SPEED)

    @property
    def model_parallel_size(self) -> int:
        """How many consecutive ranks work on the same sequences; `shard_data` gives them the same data shard."""
        return 1

    @property
    def gathers_weights(self) -> bool:
        """Whether a rank brings whole weights together to compute with them.

        Else it computes with its shard, which in bfloat16 lies in memory beside master weights that are shared out as moments
        are, and whole weights go by one at a time where they leave.
        """
        return True

    def shard_ranks(self, num_ranks: int) -> int:
        """Return among how many of `num_ranks` ranks one copy of the weights is spread."""
        return num_ranks

    def expert_ranks(self, num_ranks: int) -> int:
        """Return the same of the experts of a mixture."""
        return self.shard_ranks(num_ranks)

    def moment_ranks(self, num_ranks: int) -> int:
        """Return the same of what the optimizer keeps."""
        return self.shard_ranks(num_ranks)


C = TypeVar("C", bound=EngineConfig)


def require_config(config: EngineConfig, cls: type[C]) -> C:
    """Return `config`, which an engine whose settings are a `cls` was given.

    Raises:
        ConfigError: it is of another class.
    """
    if not isinstance(config, cls):
        raise ConfigError(
            f"this engine takes settings of the class {cls.__name__}, got {type(config).__name__}; "
            "make them with `engine_class(name).Config(...)`"
        )
    return config


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
    TOP_TOKENS = "top_tokens"


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
