from .config import LoraConfig as LoraConfig, RolloutConfig as RolloutConfig
from .errors import (
    CompletionError as CompletionError,
    ConfigError as ConfigError,
    EngineStateError as EngineStateError,
    NoReplica as NoReplica,
    ReplicaGone as ReplicaGone,
    RequestError as RequestError,
    RequestTimeout as RequestTimeout,
    RolloutError as RolloutError,
    UpdateRefused as UpdateRefused,
)
from .interface import (
    RolloutEngine as RolloutEngine,
    ServerUpdates as ServerUpdates,
    TensorUpdates as TensorUpdates,
    WorkerUpdates as WorkerUpdates,
)
from .toolkit.pool import ReplicaPool as ReplicaPool
from .toolkit.registry import (
    adapter_class as adapter_class,
    adapter_environment as adapter_environment,
    adapter_names as adapter_names,
)
from .toolkit.slots import EngineReplica as EngineReplica, Replica as Replica
from .types import TopLogprobs as TopLogprobs
from .types import (
    Completion as Completion,
    Finish as Finish,
    GenerateRequest as GenerateRequest,
    Health as Health,
    PauseMode as PauseMode,
    RolloutCapabilities as RolloutCapabilities,
    RolloutFeature as RolloutFeature,
    SamplingParams as SamplingParams,
    VersionSpan as VersionSpan,
    version_spans as version_spans,
)
