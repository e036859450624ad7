"""Training loops, algorithms and the Ray cluster of Offbeat."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_trainer.algorithms.advantages import compute_advantages
    from offbeat_trainer.algorithms.aggregation import aggregate
    from offbeat_trainer.algorithms.kl import kl_estimate
    from offbeat_trainer.algorithms.policy_loss import PolicyLoss
    from offbeat_trainer.algorithms.value_loss import ValueLoss, gae
    from offbeat_trainer.assemble import assemble_examples, group_metrics, with_advantages
    from offbeat_trainer.config import (
        Advantage,
        Aggregation,
        AlgorithmConfig,
        ClusterConfig,
        KlEstimator,
        LoopConfig,
        SamplingConfig,
        WarmupConfig,
    )
    from offbeat_trainer.errors import DeadlineExceeded, PlanRefused, ResumeError, TrainerError, WorkerGone
    from offbeat_trainer.interface import Generator, Policy, Publisher, Reporter, Supervised, Task
    from offbeat_trainer.metrics import Last, Max, Mean, Metric, Sum, reduce_metrics
    from offbeat_trainer.reporters.console import ConsoleReporter
    from offbeat_trainer.reporters.fanout import FanOut
    from offbeat_trainer.reporters.jsonl import JsonlReporter
    from offbeat_trainer.reporters.silent import Silent
    from offbeat_trainer.reporters.tensorboard import TensorBoardReporter
    from offbeat_trainer.reporters.wandb import WandbReporter
    from offbeat_trainer.roles import Actor, Reference
    from offbeat_trainer.types import Example, Group, Prompt, Score
    from offbeat_trainer.value_roles import Critic, RewardModel

# Public names and the module each lives in: importing the package stays cheap, torch comes with the first use.
# (`assemble` itself is not among them: here that name is its module.)
_HOMES = {
    "compute_advantages": "algorithms.advantages",
    "aggregate": "algorithms.aggregation",
    "kl_estimate": "algorithms.kl",
    "PolicyLoss": "algorithms.policy_loss",
    "ValueLoss": "algorithms.value_loss",
    "gae": "algorithms.value_loss",
    "assemble_examples": "assemble",
    "group_metrics": "assemble",
    "with_advantages": "assemble",
    "Advantage": "config",
    "Aggregation": "config",
    "AlgorithmConfig": "config",
    "ClusterConfig": "config",
    "KlEstimator": "config",
    "LoopConfig": "config",
    "SamplingConfig": "config",
    "WarmupConfig": "config",
    "DeadlineExceeded": "errors",
    "PlanRefused": "errors",
    "ResumeError": "errors",
    "TrainerError": "errors",
    "WorkerGone": "errors",
    "Generator": "interface",
    "Policy": "interface",
    "Publisher": "interface",
    "Reporter": "interface",
    "Supervised": "interface",
    "Task": "interface",
    "Last": "metrics",
    "Max": "metrics",
    "Mean": "metrics",
    "Metric": "metrics",
    "Sum": "metrics",
    "reduce_metrics": "metrics",
    "ConsoleReporter": "reporters.console",
    "FanOut": "reporters.fanout",
    "JsonlReporter": "reporters.jsonl",
    "Silent": "reporters.silent",
    "TensorBoardReporter": "reporters.tensorboard",
    "WandbReporter": "reporters.wandb",
    "Example": "types",
    "Group": "types",
    "Prompt": "types",
    "Score": "types",
    "Actor": "roles",
    "Reference": "roles",
    "Critic": "value_roles",
    "RewardModel": "value_roles",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Actor",
    "Advantage",
    "Aggregation",
    "AlgorithmConfig",
    "ClusterConfig",
    "ConsoleReporter",
    "Critic",
    "DeadlineExceeded",
    "Example",
    "FanOut",
    "Generator",
    "Group",
    "JsonlReporter",
    "KlEstimator",
    "Last",
    "LoopConfig",
    "Max",
    "Mean",
    "Metric",
    "PlanRefused",
    "Policy",
    "PolicyLoss",
    "Prompt",
    "Publisher",
    "Reference",
    "Reporter",
    "ResumeError",
    "RewardModel",
    "SamplingConfig",
    "Score",
    "Silent",
    "Sum",
    "Supervised",
    "Task",
    "TensorBoardReporter",
    "TrainerError",
    "ValueLoss",
    "WandbReporter",
    "WarmupConfig",
    "WorkerGone",
    "aggregate",
    "assemble_examples",
    "compute_advantages",
    "gae",
    "group_metrics",
    "kl_estimate",
    "reduce_metrics",
    "with_advantages",
]
