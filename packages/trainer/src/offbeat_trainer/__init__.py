"""Training loops, algorithms and the Ray cluster of Offbeat."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from offbeat_trainer.types import Example, Group, Prompt, Score

# Public names and the module each lives in: importing the package stays cheap, torch comes with the first use.
_HOMES = {
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
    "Example": "types",
    "Group": "types",
    "Prompt": "types",
    "Score": "types",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Advantage",
    "Aggregation",
    "AlgorithmConfig",
    "ClusterConfig",
    "DeadlineExceeded",
    "Example",
    "Generator",
    "Group",
    "KlEstimator",
    "Last",
    "LoopConfig",
    "Max",
    "Mean",
    "Metric",
    "PlanRefused",
    "Policy",
    "Prompt",
    "Publisher",
    "Reporter",
    "ResumeError",
    "SamplingConfig",
    "Score",
    "Sum",
    "Supervised",
    "Task",
    "TrainerError",
    "WarmupConfig",
    "WorkerGone",
    "reduce_metrics",
]
