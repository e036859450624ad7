"""Settings of the training loops."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Advantage(StrEnum):
    """How rewards of one prompt become advantages; sources in `offbeat_trainer.algorithms.advantages`."""

    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"


class Aggregation(StrEnum):
    """How token losses become one number; see `offbeat_trainer.algorithms.aggregation`."""

    TOKEN_MEAN = "token_mean"
    SEQ_MEAN_TOKEN_SUM = "seq_mean_token_sum"
    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq_mean_token_sum_norm"


class KlEstimator(StrEnum):
    """Schulman's estimators of KL(policy || reference)."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """What is optimized.

    `clip_low` and `clip_high` bound the importance ratio in 1 - clip_low .. 1 + clip_high; `dual_clip` > 1 bounds
    the loss of negative advantages (0 = off). `kl_coef` 0 means that no reference model is loaded.
    """

    advantage: Advantage = Advantage.GRPO
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_coef: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How training completions are sampled. Truncated sampling (top-p, top-k) is not offered for training: the
    sampler's renormalised log-probs and the trainer's would not speak of the same distribution."""

    max_tokens: int = 32
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The loop's arithmetic and calendar.

    One step trains on `prompts_per_step` * `group_size` completions in `updates_per_step` equal mini-batches.
    `validate_every`, `save_every` and `sample_every` count steps; 0 = only at the ends (validation), never (saving),
    never (samples). `step_timeout_s` bounds each wait of the driver for a phase of one step.
    """

    steps: int = 100
    prompts_per_step: int = 16
    group_size: int = 16
    updates_per_step: int = 1
    validate_every: int = 10
    validation_prompts: int = 256
    save_every: int = 20
    keep_checkpoints: int = 2
    sample_every: int = 10
    step_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """Supervised training before reinforcement learning; `steps` 0 = none."""

    steps: int = 0
    batch_size: int = 64
    lr: float = 1e-3
    lr_warmup_steps: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where the processes run. Empty `ray_address` starts a private Ray on this machine.

    On CPU the devices of a pool are the cores: training and generation take turns in sync mode, so each pool may
    use them all. On GPU every rank and every tensor-parallel rank of a replica has a device of its own.
    `num_devices` 0 = count them.
    """

    ray_address: str = ""
    num_devices: int = 0
    placement: Literal["separate"] = "separate"
    start_timeout_s: float = 300.0
    rendezvous_host: str = "127.0.0.1"
    object_store_mib: int = 512
