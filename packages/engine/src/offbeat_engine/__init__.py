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
_NAMES = {
    "batch": "SCHEMA TrainBatch check_batch train_batch Field register_field units_of",
    "capabilities": "Capabilities Feature Refusal",
    "config": "Dtype EngineConfig LoraConfig LoraExport ModelConfig NonFinite OptimizerConfig OptimizerName Schedule bounded require_config",
    "fsdp2.config": "Fsdp2Config",
    "errors": "BatchError StepError CheckpointError ConfigError EngineError NonFiniteError RankLostError StateError",
    "interface": "Engine",
    "base": "EngineBase",
    "values": "LossFn LossOutput LossScale PostprocessFn Predictions PreprocessFn StepContext StepStats WeightKind WeightShard WeightSpec",
    "losses": "SftLoss",
    "toolkit.planning": "plan_micro_batches plan_shards",
    "registry": "engine_class engine_config_class engine_names",
    "saving": "SaveHandle",
    "schedules": "learning_rate",
    "world": "World",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


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
