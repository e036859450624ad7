"""What a cluster is told: plain values, so that they travel to the processes as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_ckptsync import SyncConfig
    from offbeat_rollout import RolloutConfig
    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.config import AlgorithmConfig, ClusterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """The training pool. The engines' own configs come with `TrainGroup.build`.

    Each trained role has a folder of its own in `checkpoint_dir`.
    `threads_per_rank` 0: an even share of the cores of the rank's own machine, but for `taken_cores`, which replicas use
    meanwhile, spread over all machines.
    """

    engine_name: str
    device: str
    num_ranks: int
    threads_per_rank: int
    algorithm: Algorithm[AlgorithmConfig]
    checkpoint_dir: str
    keep_checkpoints: int
    collective_timeout_s: float
    sync: SyncConfig
    taken_cores: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """The generation pool: equal replicas. `recompute_kv`: what goes on through a sync is computed anew after it.

    With `shares_cores`, colocated, each replica computes with an even share of the cores of its own machine.
    """

    adapter_name: str
    rollout: RolloutConfig
    num_replicas: int
    recompute_kv: bool = False
    shares_cores: bool = False
    environments: tuple[dict[str, str], ...] = ()  # one per replica: what its library reads at import


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A whole run's processes."""

    cluster: ClusterConfig
    train: TrainSpec
    rollout: RolloutSpec
    log_dir: str
    step_timeout_s: float
    num_gpus: int = 0  # of this machine, for a private Ray
