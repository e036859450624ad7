"""Settings of a generation engine."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """A low-rank adapter (arXiv 2106.09685) over the weights in `model_path`; `rank` 0 means none.

    It adds alpha / rank * B [out, rank] @ A [rank, in] to a weight [out, in]: nothing until the first update. With an
    adapter, updates bring its A and B alone. `targets` are endings of module names; empty means every linear layer but
    the head.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Everything one generation replica is told.

    `model_path` is a local Hugging Face folder. `max_model_len` bounds prompt plus completion, in tokens.
    `kv_cache_gib` is the memory for keys and values on CPU; on GPU `gpu_memory_fraction` counts instead.
    `request_timeout_s` bounds the work on one request (queueing and pauses do not count), and every control call.
    `enforce_eager` (no CUDA graphs) is by default for CPU only, `prefix_caching` for CUDA only: None means by device.
    `weight_backend` names the weight-transfer engine that vLLM loads through its own factory.
    """

    model_path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    max_model_len: int = 512
    max_num_seqs: int = 256
    tensor_parallel_size: int = 1
    kv_cache_gib: float = 1.0
    gpu_memory_fraction: float = 0.85
    enforce_eager: bool | None = None
    prefix_caching: bool | None = None
    weight_backend: str = "offbeat"
    cpu_threads: int = 1
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    start_timeout_s: float = 300.0
    request_timeout_s: float = 600.0
