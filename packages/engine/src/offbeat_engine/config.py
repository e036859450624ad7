"""Settings of an engine: frozen values, plain types only, validated by whoever reads them from a file."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model the engine trains.

    `path` is a local Hugging Face folder (config.json, tokenizer, safetensors). `random_init` takes only
    the shape from it and draws weights from `seed`.
    """

    path: str
    random_init: bool = False
    seed: int = 0
    head: Literal["lm", "value"] = "lm"
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW on float32 master weights; `max_grad_norm` <= 0 turns clipping off."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    total_steps: int = 0  # needed by linear and cosine; 0 = unknown
    min_lr_ratio: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything a training engine is told.

    `micro_batch_tokens` is the budget of one micro-batch, in tokens after packing; a single longer sequence
    gets a micro-batch of its own. `collective_timeout_s` bounds every wait for another rank.
    """

    model: ModelConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dtype: Dtype = Dtype.FLOAT32
    device: Literal["cpu", "cuda"] = "cpu"
    micro_batch_tokens: int = 16384
    packing: bool = True
    activation_checkpointing: bool = False
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    on_nonfinite: NonFinite = NonFinite.STOP
    collective_timeout_s: float = 600.0
