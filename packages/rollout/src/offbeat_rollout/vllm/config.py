"""Settings of vLLM."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from dataclasses import dataclass, field
from typing import Any

from offbeat_rollout.config import SPEED, RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig(RolloutConfig):
    """What a vLLM replica is told.

    `weight_backend` names the weight-transfer engine that vLLM loads through its own factory. `engine_args` are further
    arguments of vLLM's `AsyncEngineArgs`, by vLLM's names; see `arguments` for those that are not taken.
    """

    enforce_eager: bool | None = field(default=None, metadata=SPEED)  # no CUDA graphs; null: on CPU alone
    prefix_caching: bool | None = field(
        default=None, metadata=SPEED
    )  # what prompts begin with is kept; null: on CUDA alone
    weight_backend: str = field(default="offbeat", metadata={"derived": "the weight sync of a run"})
    engine_args: dict[str, Any] = field(default_factory=dict[str, Any], metadata={"free": True})
