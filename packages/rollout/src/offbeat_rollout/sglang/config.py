"""Settings of SGLang."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from dataclasses import dataclass, field
from typing import Any, Literal

from offbeat_rollout.config import SPEED, RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig(RolloutConfig):
    """What an SGLang replica is told.

    `updates_by` says how the server gets new weights, by whoever brings them: by files in shared memory; by `tensors` of the calls,
    which on GPUs say where they lie (CUDA IPC); or over a process group, on GPUs NCCL from a GPU that is none of the server's. On
    GPUs none of the three was ever run.

    `environment` is the folder of the virtual environment that SGLang is installed in; empty means the one beside this,
    with `-sglang` behind its name, which `tools/setup` makes. `deterministic` makes SGLang honour seeds, whatever else
    is in the batch: without it SGLang ignores them. It costs the prefix cache on CPU, and on GPUs SGLang's faster products and sampler. `server_args` are further arguments of
    SGLang's `ServerArgs`, by SGLang's names; see `arguments` for those that are not taken.
    """

    updates_by: Literal["files", "tensors", "group"] = field(
        default="files", metadata={**SPEED, "derived": "sync.transport and device"}
    )
    environment: str = ""
    deterministic: bool = True
    server_args: dict[str, Any] = field(default_factory=dict[str, Any], metadata={"free": True})
