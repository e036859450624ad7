"""The vLLM adapter. vLLM itself is imported at `start`, in the process that runs the engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from offbeat_rollout.vllm.config import VllmConfig
from offbeat_rollout.vllm.processes import vllm_environment

if TYPE_CHECKING:
    from offbeat_rollout.vllm.engine import VllmEngine

__all__ = ["VllmConfig", "VllmEngine", "vllm_environment"]


def __getattr__(name: str) -> object:
    if name != "VllmEngine":  # whoever reads settings needs no arrays
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("offbeat_rollout.vllm.engine").VllmEngine
