from .base import EngineBase as EngineBase
from .batch import (
    Field as Field,
    SCHEMA as SCHEMA,
    TrainBatch as TrainBatch,
    check_batch as check_batch,
    register_field as register_field,
    train_batch as train_batch,
    units_of as units_of,
)
from .config import (
    Capabilities as Capabilities,
    Dtype as Dtype,
    EngineConfig as EngineConfig,
    Feature as Feature,
    LoraConfig as LoraConfig,
    LoraExport as LoraExport,
    ModelConfig as ModelConfig,
    NonFinite as NonFinite,
    OptimizerConfig as OptimizerConfig,
    OptimizerName as OptimizerName,
    Refusal as Refusal,
    Schedule as Schedule,
    bounded as bounded,
    require_config as require_config,
)
from .errors import (
    BatchError as BatchError,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    EngineError as EngineError,
    NonFiniteError as NonFiniteError,
    RankLostError as RankLostError,
    StateError as StateError,
    StepError as StepError,
)
from .fsdp2.config import Fsdp2Config as Fsdp2Config
from .interface import Engine as Engine
from .batch import SftLoss as SftLoss
from .interface import (
    engine_class as engine_class,
    engine_config_class as engine_config_class,
    engine_names as engine_names,
)
from .toolkit.state.saves import SaveHandle as SaveHandle
from .toolkit.step.schedules import learning_rate as learning_rate
from .toolkit.step.planning import plan_micro_batches as plan_micro_batches, plan_shards as plan_shards
from .batch import (
    LossFn as LossFn,
    LossOutput as LossOutput,
    LossScale as LossScale,
    PostprocessFn as PostprocessFn,
    Predictions as Predictions,
    PreprocessFn as PreprocessFn,
    StepContext as StepContext,
    StepStats as StepStats,
    WeightKind as WeightKind,
    WeightShard as WeightShard,
    WeightSpec as WeightSpec,
)
from .toolkit.world import World as World
