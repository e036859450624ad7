"""The vLLM adapter. vLLM itself is imported at `start`, in the process that runs the engine."""

from __future__ import annotations

from offbeat_rollout.vllm.engine import VllmEngine
from offbeat_rollout.vllm.environment import vllm_environment

__all__ = ["VllmEngine", "vllm_environment"]
