"""Training loops, algorithms and the Ray cluster of Offbeat."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_trainer.algorithms.advantages import compute_advantages, group_advantages
    from offbeat_trainer.algorithms.aggregation import aggregate
    from offbeat_trainer.algorithms.grpo import DrGrpo, GroupPolicyGradient, Grpo, Rloo
    from offbeat_trainer.algorithms.interface import Algorithm, StepShape
    from offbeat_trainer.algorithms.kl import kl_estimate
    from offbeat_trainer.algorithms.policy_loss import PolicyLoss
    from offbeat_trainer.algorithms.ppo import Ppo
    from offbeat_trainer.algorithms.registry import algorithm_class, algorithm_config_class, algorithm_names
    from offbeat_trainer.algorithms.value_loss import ValueLoss, gae
    from offbeat_trainer.algorithms.value_roles import Critic, RewardModel
    from offbeat_trainer.assemble import assemble_examples, group_metrics
    from offbeat_trainer.buffer import GroupBuffer
    from offbeat_trainer.config import (
        Advantage,
        Aggregation,
        AlgorithmConfig,
        AsyncConfig,
        ClusterConfig,
        Correction,
        CorrectionLevel,
        DrGrpoConfig,
        GrpoConfig,
        KlEstimator,
        LoopConfig,
        OnStall,
        Order,
        Partial,
        PolicyLossConfig,
        PpoConfig,
        Proximal,
        RewardConfig,
        RlooConfig,
        SamplingConfig,
        TooOld,
        WarmupConfig,
    )
    from offbeat_trainer.errors import (
        DeadlineExceeded,
        LoadError,
        PlanRefused,
        ResumeError,
        RewardFailed,
        TrainerError,
        WorkerGone,
    )
    from offbeat_trainer.gate import StalenessGate
    from offbeat_trainer.interface import Generator, Policy, Publisher, Reporter, Scorer, Supervised, Task
    from offbeat_trainer.journal.events import Journal
    from offbeat_trainer.journal.memory import MemoryJournal
    from offbeat_trainer.journal.segments import SegmentJournal
    from offbeat_trainer.journal.sqlite import SqliteJournal
    from offbeat_trainer.learner import Learner
    from offbeat_trainer.metrics import Last, Max, Mean, Metric, Sum, reduce_metrics
    from offbeat_trainer.reporters.console import ConsoleReporter
    from offbeat_trainer.reporters.fanout import FanOut
    from offbeat_trainer.reporters.jsonl import JsonlReporter
    from offbeat_trainer.reporters.silent import Silent
    from offbeat_trainer.reporters.tensorboard import TensorBoardReporter
    from offbeat_trainer.reporters.wandb import WandbReporter
    from offbeat_trainer.roles import Role, RoleSpec
    from offbeat_trainer.schedule import Schedule
    from offbeat_trainer.timeline import Timeline
    from offbeat_trainer.types import Example, Group, Prompt, Score
    from offbeat_trainer.watchdog import Watchdog

# Public names and the module each lives in: importing the package stays cheap, torch comes with the first use.
# (`assemble` itself is not among them: here that name is its module.)
_HOMES = {
    "compute_advantages": "algorithms.advantages",
    "group_advantages": "algorithms.advantages",
    "aggregate": "algorithms.aggregation",
    "DrGrpo": "algorithms.grpo",
    "GroupPolicyGradient": "algorithms.grpo",
    "Grpo": "algorithms.grpo",
    "Rloo": "algorithms.grpo",
    "Algorithm": "algorithms.interface",
    "StepShape": "algorithms.interface",
    "kl_estimate": "algorithms.kl",
    "PolicyLoss": "algorithms.policy_loss",
    "Ppo": "algorithms.ppo",
    "algorithm_class": "algorithms.registry",
    "algorithm_config_class": "algorithms.registry",
    "algorithm_names": "algorithms.registry",
    "ValueLoss": "algorithms.value_loss",
    "gae": "algorithms.value_loss",
    "assemble_examples": "assemble",
    "group_metrics": "assemble",
    "GroupBuffer": "buffer",
    "Advantage": "config",
    "Aggregation": "config",
    "AlgorithmConfig": "config",
    "AsyncConfig": "config",
    "ClusterConfig": "config",
    "Correction": "config",
    "CorrectionLevel": "config",
    "DrGrpoConfig": "config",
    "GrpoConfig": "config",
    "KlEstimator": "config",
    "LoopConfig": "config",
    "OnStall": "config",
    "Order": "config",
    "Partial": "config",
    "PolicyLossConfig": "config",
    "PpoConfig": "config",
    "Proximal": "config",
    "RewardConfig": "config",
    "RlooConfig": "config",
    "SamplingConfig": "config",
    "TooOld": "config",
    "WarmupConfig": "config",
    "DeadlineExceeded": "errors",
    "LoadError": "errors",
    "PlanRefused": "errors",
    "ResumeError": "errors",
    "RewardFailed": "errors",
    "TrainerError": "errors",
    "WorkerGone": "errors",
    "StalenessGate": "gate",
    "Generator": "interface",
    "Policy": "interface",
    "Publisher": "interface",
    "Reporter": "interface",
    "Scorer": "interface",
    "Supervised": "interface",
    "Task": "interface",
    "Journal": "journal.events",
    "MemoryJournal": "journal.memory",
    "SegmentJournal": "journal.segments",
    "SqliteJournal": "journal.sqlite",
    "Learner": "learner",
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
    "Role": "roles",
    "RoleSpec": "roles",
    "Schedule": "schedule",
    "Timeline": "timeline",
    "Example": "types",
    "Group": "types",
    "Prompt": "types",
    "Score": "types",
    "Critic": "algorithms.value_roles",
    "RewardModel": "algorithms.value_roles",
    "Watchdog": "watchdog",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Advantage",
    "Aggregation",
    "Algorithm",
    "AlgorithmConfig",
    "AsyncConfig",
    "ClusterConfig",
    "ConsoleReporter",
    "Correction",
    "CorrectionLevel",
    "Critic",
    "DeadlineExceeded",
    "DrGrpo",
    "DrGrpoConfig",
    "Example",
    "FanOut",
    "Generator",
    "Group",
    "GroupBuffer",
    "GroupPolicyGradient",
    "Grpo",
    "GrpoConfig",
    "Journal",
    "JsonlReporter",
    "KlEstimator",
    "Last",
    "Learner",
    "LoadError",
    "LoopConfig",
    "Max",
    "Mean",
    "MemoryJournal",
    "Metric",
    "OnStall",
    "Order",
    "Partial",
    "PlanRefused",
    "Policy",
    "PolicyLoss",
    "PolicyLossConfig",
    "Ppo",
    "PpoConfig",
    "Prompt",
    "Proximal",
    "Publisher",
    "Reporter",
    "ResumeError",
    "RewardConfig",
    "RewardFailed",
    "RewardModel",
    "Rloo",
    "RlooConfig",
    "Role",
    "RoleSpec",
    "SamplingConfig",
    "Schedule",
    "Score",
    "Scorer",
    "SegmentJournal",
    "Silent",
    "SqliteJournal",
    "StalenessGate",
    "StepShape",
    "Sum",
    "Supervised",
    "Task",
    "TensorBoardReporter",
    "Timeline",
    "TooOld",
    "TrainerError",
    "ValueLoss",
    "WandbReporter",
    "WarmupConfig",
    "Watchdog",
    "WorkerGone",
    "aggregate",
    "algorithm_class",
    "algorithm_config_class",
    "algorithm_names",
    "assemble_examples",
    "compute_advantages",
    "gae",
    "group_advantages",
    "group_metrics",
    "kl_estimate",
    "reduce_metrics",
]
