"""Settings of SGLang."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from dataclasses import dataclass, field
from typing import Any

from offbeat_rollout.config import RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig(RolloutConfig):
    """What an SGLang replica is told.

    `environment` is the folder of the virtual environment that SGLang is installed in; empty means the one beside this,
    with `-sglang` behind its name, which `tools/setup` makes. `deterministic` makes SGLang honour seeds, whatever else
    is in the batch: without it SGLang ignores them. It costs the prefix cache on CPU, and on GPUs SGLang's faster products and sampler. `server_args` are further arguments of
    SGLang's `ServerArgs`, by SGLang's names; see `arguments` for those that are not taken.
    """

    environment: str = ""
    deterministic: bool = True
    server_args: dict[str, Any] = field(default_factory=dict[str, Any], metadata={"free": True})
