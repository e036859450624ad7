"""Training loops, algorithms and the Ray cluster of Offbeat."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_trainer.algorithm_configs import DistillConfig, DpoConfig, SftConfig
    from offbeat_trainer.algorithms.distill import Distill
    from offbeat_trainer.algorithms.dpo import Dpo
    from offbeat_trainer.algorithms.grpo import (
        DrGrpo,
        GroupPolicyGradient,
        Grpo,
        Rloo,
        compute_advantages,
        group_advantages,
    )
    from offbeat_trainer.algorithms.interface import Algorithm, StepShape
    from offbeat_trainer.algorithms.offline import OfflineAlgorithm
    from offbeat_trainer.algorithms.policy_loss import PolicyLoss, aggregate
    from offbeat_trainer.algorithms.ppo import Ppo
    from offbeat_trainer.algorithms.ratios import kl_estimate
    from offbeat_trainer.algorithms.registry import algorithm_class, algorithm_config_class, algorithm_names
    from offbeat_trainer.algorithms.sft import Sft
    from offbeat_trainer.algorithms.value_loss import ValueLoss, gae
    from offbeat_trainer.config import (
        Advantage,
        Aggregation,
        AlgorithmConfig,
        AsyncConfig,
        ClusterConfig,
        Correction,
        CorrectionLevel,
        DrGrpoConfig,
        EnvironmentConfig,
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
        RewardFrom,
        RlooConfig,
        SamplingConfig,
        TooOld,
        WarmupConfig,
    )
    from offbeat_trainer.data.assemble import assemble_examples, group_metrics
    from offbeat_trainer.data.types import Example, Group, Limit, Pair, Prompt, Score, Trajectory, Turn
    from offbeat_trainer.errors import (
        DeadlineExceeded,
        EnvironmentFailed,
        GroupFailed,
        LoadError,
        PlanRefused,
        ResumeError,
        RewardFailed,
        TrainerError,
        WorkerGone,
    )
    from offbeat_trainer.interface import (
        Generator,
        Policy,
        Publisher,
        Reporter,
        Rollout,
        Scorer,
        Supervised,
        Task,
    )
    from offbeat_trainer.learner import Learner
    from offbeat_trainer.metrics import Last, Max, Mean, Metric, Sum, reduce_metrics
    from offbeat_trainer.roles.critic import Critic
    from offbeat_trainer.roles.reward import RewardModel
    from offbeat_trainer.roles.role import Role, RoleSpec
    from offbeat_trainer.rollouts.environment import Action, Environment, Feedback, find_environment
    from offbeat_trainer.rollouts.multi import MultiTurn, Scene
    from offbeat_trainer.rollouts.single import SingleTurn
    from offbeat_trainer.stream.buffer import GroupBuffer
    from offbeat_trainer.stream.gate import StalenessGate
    from offbeat_trainer.stream.journal.events import Journal, MemoryJournal
    from offbeat_trainer.stream.journal.segments import SegmentJournal
    from offbeat_trainer.stream.journal.sqlite import SqliteJournal
    from offbeat_trainer.stream.schedule import Schedule
    from offbeat_trainer.watch.reporters.console import ConsoleReporter
    from offbeat_trainer.watch.reporters.fanout import FanOut
    from offbeat_trainer.watch.reporters.jsonl import JsonlReporter
    from offbeat_trainer.watch.reporters.silent import Silent
    from offbeat_trainer.watch.reporters.tensorboard import TensorBoardReporter
    from offbeat_trainer.watch.reporters.trackio import TrackioReporter
    from offbeat_trainer.watch.reporters.wandb import WandbReporter
    from offbeat_trainer.watch.timeline import Timeline
    from offbeat_trainer.watch.watchdog import Watchdog

# Public names and the module each lives in: importing the package stays cheap, torch comes with the first use.
# (`assemble` itself is not among them: here that name is its module.)
_HOMES = {
    name: module
    for module, names in {
        "algorithm_configs": "DistillConfig DpoConfig SftConfig",
        "algorithms.distill": "Distill",
        "algorithms.dpo": "Dpo",
        "algorithms.grpo": "DrGrpo GroupPolicyGradient Grpo Rloo compute_advantages group_advantages",
        "algorithms.interface": "Algorithm StepShape",
        "algorithms.offline": "OfflineAlgorithm",
        "algorithms.policy_loss": "PolicyLoss aggregate",
        "algorithms.ppo": "Ppo",
        "algorithms.ratios": "kl_estimate",
        "algorithms.registry": "algorithm_class algorithm_config_class algorithm_names",
        "algorithms.sft": "Sft",
        "algorithms.value_loss": "ValueLoss gae",
        "config": "Advantage Aggregation AlgorithmConfig AsyncConfig ClusterConfig Correction CorrectionLevel "
        "DrGrpoConfig EnvironmentConfig GrpoConfig KlEstimator LoopConfig OnStall Order Partial "
        "PolicyLossConfig PpoConfig Proximal RewardConfig RewardFrom RlooConfig SamplingConfig TooOld "
        "WarmupConfig",
        "data.assemble": "assemble_examples group_metrics",
        "data.types": "Example Group Limit Pair Prompt Score Trajectory Turn",
        "errors": "DeadlineExceeded EnvironmentFailed GroupFailed LoadError PlanRefused ResumeError "
        "RewardFailed TrainerError WorkerGone",
        "interface": "Generator Policy Publisher Reporter Rollout Scorer Supervised Task",
        "learner": "Learner",
        "metrics": "Last Max Mean Metric Sum reduce_metrics",
        "roles.critic": "Critic",
        "roles.reward": "RewardModel",
        "roles.role": "Role RoleSpec",
        "rollouts.environment": "Action Environment Feedback find_environment",
        "rollouts.multi": "MultiTurn Scene",
        "rollouts.single": "SingleTurn",
        "stream.buffer": "GroupBuffer",
        "stream.gate": "StalenessGate",
        "stream.journal.events": "Journal MemoryJournal",
        "stream.journal.segments": "SegmentJournal",
        "stream.journal.sqlite": "SqliteJournal",
        "stream.schedule": "Schedule",
        "watch.reporters.console": "ConsoleReporter",
        "watch.reporters.fanout": "FanOut",
        "watch.reporters.jsonl": "JsonlReporter",
        "watch.reporters.silent": "Silent",
        "watch.reporters.tensorboard": "TensorBoardReporter",
        "watch.reporters.trackio": "TrackioReporter",
        "watch.reporters.wandb": "WandbReporter",
        "watch.timeline": "Timeline",
        "watch.watchdog": "Watchdog",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Action",
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
    "Distill",
    "DistillConfig",
    "Dpo",
    "DpoConfig",
    "DrGrpo",
    "DrGrpoConfig",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentFailed",
    "Example",
    "FanOut",
    "Feedback",
    "Generator",
    "Group",
    "GroupBuffer",
    "GroupFailed",
    "GroupPolicyGradient",
    "Grpo",
    "GrpoConfig",
    "Journal",
    "JsonlReporter",
    "KlEstimator",
    "Last",
    "Learner",
    "Limit",
    "LoadError",
    "LoopConfig",
    "Max",
    "Mean",
    "MemoryJournal",
    "Metric",
    "MultiTurn",
    "OfflineAlgorithm",
    "OnStall",
    "Order",
    "Pair",
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
    "RewardFrom",
    "RewardModel",
    "Rloo",
    "RlooConfig",
    "Role",
    "RoleSpec",
    "Rollout",
    "SamplingConfig",
    "Scene",
    "Schedule",
    "Score",
    "Scorer",
    "SegmentJournal",
    "Sft",
    "SftConfig",
    "Silent",
    "SingleTurn",
    "SqliteJournal",
    "StalenessGate",
    "StepShape",
    "Sum",
    "Supervised",
    "Task",
    "TensorBoardReporter",
    "Timeline",
    "TooOld",
    "TrackioReporter",
    "TrainerError",
    "Trajectory",
    "Turn",
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
    "find_environment",
    "gae",
    "group_advantages",
    "group_metrics",
    "kl_estimate",
    "reduce_metrics",
]
