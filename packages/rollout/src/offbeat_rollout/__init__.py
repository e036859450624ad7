"""Generation adapters for RL: vLLM, SGLang, and a plain Transformers reference."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_rollout.config import LoraConfig, RolloutConfig
    from offbeat_rollout.errors import (
        CompletionError,
        ConfigError,
        EngineStateError,
        NoReplica,
        ReplicaGone,
        RequestError,
        RequestTimeout,
        RolloutError,
        UpdateRefused,
    )
    from offbeat_rollout.interface import RolloutEngine, TensorUpdates, WorkerUpdates
    from offbeat_rollout.pool import ReplicaPool
    from offbeat_rollout.registry import adapter_class, adapter_environment, adapter_names
    from offbeat_rollout.seats import EngineReplica, Replica
    from offbeat_rollout.top_logprobs import TopLogprobs
    from offbeat_rollout.types import (
        Completion,
        Finish,
        GenerateRequest,
        Health,
        PauseMode,
        RolloutCapabilities,
        RolloutFeature,
        SamplingParams,
        VersionSpan,
        version_spans,
    )

# Public names and the module each lives in: importing the package stays cheap, torch comes with the first use.
_HOMES = {
    name: module
    for module, names in {
        "config": "LoraConfig RolloutConfig",
        "errors": "CompletionError ConfigError EngineStateError NoReplica ReplicaGone RequestError "
        "RequestTimeout RolloutError UpdateRefused",
        "interface": "RolloutEngine TensorUpdates WorkerUpdates",
        "pool": "ReplicaPool",
        "registry": "adapter_class adapter_environment adapter_names",
        "seats": "EngineReplica Replica",
        "top_logprobs": "TopLogprobs",
        "types": "Completion Finish GenerateRequest Health PauseMode RolloutCapabilities RolloutFeature "
        "SamplingParams VersionSpan version_spans",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Completion",
    "CompletionError",
    "ConfigError",
    "EngineReplica",
    "EngineStateError",
    "Finish",
    "GenerateRequest",
    "Health",
    "LoraConfig",
    "NoReplica",
    "PauseMode",
    "Replica",
    "ReplicaGone",
    "ReplicaPool",
    "RequestError",
    "RequestTimeout",
    "RolloutCapabilities",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutError",
    "RolloutFeature",
    "SamplingParams",
    "TensorUpdates",
    "TopLogprobs",
    "UpdateRefused",
    "VersionSpan",
    "WorkerUpdates",
    "adapter_class",
    "adapter_environment",
    "adapter_names",
    "version_spans",
]
