"""One training-engine interface for language models, with FSDP2 and megatron-core behind it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_engine.base import EngineBase
    from offbeat_engine.batch import (
        SCHEMA,
        Field,
        TrainBatch,
        check_batch,
        register_field,
        train_batch,
        units_of,
    )
    from offbeat_engine.capabilities import Capabilities, Feature, Refusal
    from offbeat_engine.config import (
        Dtype,
        EngineConfig,
        LoraConfig,
        LoraExport,
        ModelConfig,
        NonFinite,
        OptimizerConfig,
        OptimizerName,
        Schedule,
        bounded,
        require_config,
    )
    from offbeat_engine.errors import (
        BatchError,
        CheckpointError,
        ConfigError,
        EngineError,
        NonFiniteError,
        RankLostError,
        StateError,
        StepError,
    )
    from offbeat_engine.fsdp2.config import Fsdp2Config
    from offbeat_engine.interface import Engine
    from offbeat_engine.losses import SftLoss
    from offbeat_engine.registry import engine_class, engine_config_class, engine_names
    from offbeat_engine.saving import SaveHandle
    from offbeat_engine.schedules import learning_rate
    from offbeat_engine.toolkit.planning import plan_micro_batches, plan_shards
    from offbeat_engine.values import (
        LossFn,
        LossOutput,
        LossScale,
        PostprocessFn,
        Predictions,
        PreprocessFn,
        StepContext,
        StepStats,
        WeightKind,
        WeightShard,
        WeightSpec,
    )
    from offbeat_engine.world import World

# Public names and the module each lives in: importing the package stays cheap, torch comes with the first use.
_HOMES = {
    "SCHEMA": "batch",
    "TrainBatch": "batch",
    "check_batch": "batch",
    "train_batch": "batch",
    "Capabilities": "capabilities",
    "Feature": "capabilities",
    "Refusal": "capabilities",
    "Dtype": "config",
    "EngineConfig": "config",
    "LoraConfig": "config",
    "LoraExport": "config",
    "ModelConfig": "config",
    "NonFinite": "config",
    "OptimizerConfig": "config",
    "OptimizerName": "config",
    "Schedule": "config",
    "bounded": "config",
    "require_config": "config",
    "Fsdp2Config": "fsdp2.config",
    "BatchError": "errors",
    "StepError": "errors",
    "Field": "batch",
    "register_field": "batch",
    "units_of": "batch",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "EngineError": "errors",
    "NonFiniteError": "errors",
    "RankLostError": "errors",
    "StateError": "errors",
    "Engine": "interface",
    "EngineBase": "base",
    "LossFn": "values",
    "LossOutput": "values",
    "LossScale": "values",
    "PostprocessFn": "values",
    "Predictions": "values",
    "PreprocessFn": "values",
    "StepContext": "values",
    "StepStats": "values",
    "WeightKind": "values",
    "WeightShard": "values",
    "WeightSpec": "values",
    "SftLoss": "losses",
    "plan_micro_batches": "toolkit.planning",
    "plan_shards": "toolkit.planning",
    "engine_class": "registry",
    "engine_config_class": "registry",
    "engine_names": "registry",
    "SaveHandle": "saving",
    "learning_rate": "schedules",
    "World": "world",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "SCHEMA",
    "BatchError",
    "Capabilities",
    "CheckpointError",
    "ConfigError",
    "Dtype",
    "Engine",
    "EngineBase",
    "EngineConfig",
    "EngineError",
    "Feature",
    "Field",
    "Fsdp2Config",
    "LoraConfig",
    "LoraExport",
    "LossFn",
    "LossOutput",
    "LossScale",
    "ModelConfig",
    "NonFinite",
    "NonFiniteError",
    "OptimizerConfig",
    "OptimizerName",
    "PostprocessFn",
    "Predictions",
    "PreprocessFn",
    "RankLostError",
    "Refusal",
    "SaveHandle",
    "Schedule",
    "SftLoss",
    "StateError",
    "StepContext",
    "StepError",
    "StepStats",
    "TrainBatch",
    "WeightKind",
    "WeightShard",
    "WeightSpec",
    "World",
    "bounded",
    "check_batch",
    "engine_class",
    "engine_config_class",
    "engine_names",
    "learning_rate",
    "plan_micro_batches",
    "plan_shards",
    "register_field",
    "require_config",
    "train_batch",
    "units_of",
]
