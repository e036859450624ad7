"""What the chosen engine and adapter declare that they can do, in the questions that placing and wiring have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_engine.capabilities import Feature
from offbeat_engine.registry import engine_class
from offbeat_rollout.registry import adapter_class
from offbeat_rollout.types import RolloutFeature

if TYPE_CHECKING:
    from offbeat_recipes.settings.tree import RunConfig


def offloads(config: RunConfig) -> bool:
    """Whether the training engine can wait in host memory between its updates."""
    return Feature.OFFLOAD in engine_class(config.engine.name).capabilities().features


def infers_alone(config: RunConfig) -> bool:
    """Whether the training engine can hold a model that is never trained without what training needs."""
    return Feature.INFERENCE_ONLY in engine_class(config.engine.name).capabilities().features


def recomputes(config: RunConfig) -> bool:
    """Whether a replica can compute keys and values of what it has under way again."""
    return RolloutFeature.RECOMPUTE_KV in adapter_class(config.rollout.name).capabilities().features


def sleeps(config: RunConfig) -> bool:
    """Whether a resting replica gives the memory of its device back."""
    return config.device in adapter_class(config.rollout.name).capabilities().sleep_devices
