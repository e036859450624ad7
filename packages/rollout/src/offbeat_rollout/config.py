"""Settings of a generation engine."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from offbeat_rollout.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank matrices (LoRA, arXiv 2106.09685) over the weights in `model_path`; `rank` 0 means none.

    They add alpha / rank * B [out, rank] @ A [rank, in] to a weight [out, in]: nothing until the first update, and updates
    bring A and B alone. `targets` are endings of module names; empty means every linear layer but
    the head.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ()


SPEED: Mapping[str, object] = {"speed": True}
"""Metadata of a field, see `RolloutConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What every adapter is told of one generation replica; one with settings of its own extends this class.

    `model_path` is a local Hugging Face folder. `max_model_len` bounds prompt plus completion, in tokens.
    `tensor_parallel_size` is the number of devices. `request_timeout_s` bounds the work on one request without a token of it
    (queueing and pauses do not count), and every control call. With `stop_strings` the tokenizer in the folder is read too, and
    requests may end at a text. With `record_experts` completions tell which experts of a mixture each token went to. A field with the metadata `SPEED` changes how fast completions come and where from, and of their log-probs no more than the
    rounding: a run may go on with another value.
    """

    model_path: str
    trust_remote_code: bool = False  # whether Python code in the model's folder may run
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    max_model_len: int = field(default=512, metadata={"at_least": 1})
    max_num_seqs: int = field(default=256, metadata={**SPEED, "at_least": 1})
    """most sequences that a replica generates at a time"""
    tensor_parallel_size: int = field(default=1, metadata={**SPEED, "at_least": 1})
    kv_cache_gib: float = field(default=1.0, metadata={**SPEED, "at_least": 0})
    """memory for keys and values, on CPU"""
    gpu_memory_fraction: float = field(default=0.85, metadata={**SPEED, "at_least": 0, "at_most": 1})
    """share of a GPU's memory that a replica may take"""
    cpu_threads: int = field(default=1, metadata={**SPEED, "at_least": 0})
    stop_strings: bool = False
    record_experts: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    start_timeout_s: float = field(default=300.0, metadata=SPEED)
    request_timeout_s: float = field(default=600.0, metadata=SPEED)


C = TypeVar("C", bound=RolloutConfig)


def require_config(config: RolloutConfig, cls: type[C]) -> C:
    """Return `config`, which an engine whose settings are a `cls` was given.

    Raises:
        ConfigError: it is of another class.
    """
    if not isinstance(config, cls):
        raise ConfigError(
            f"this adapter takes settings of the class {cls.__name__}, got {type(config).__name__}; "
            "make them with `adapter_class(name).Config(...)`"
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file of a model folder says, nothing where it is not there.

    Raises:
        ConfigError: it is damaged, or no JSON object.
    """
    try:
        found: object = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the {path.name} in {str(path.parent)!r}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"cannot read the {path.name} in {str(path.parent)!r}: it is no JSON object")
    return cast("dict[str, Any]", found)
