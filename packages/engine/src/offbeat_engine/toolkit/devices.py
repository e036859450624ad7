"""Whether a rank has the device that an engine is to compute on: looked at there, for the driver may sit on another machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat_engine.config import Refusal

if TYPE_CHECKING:
    from offbeat_engine.config import EngineConfig
    from offbeat_engine.toolkit.world import World


def device_refusals(config: EngineConfig, world: World) -> list[Refusal]:
    """Return why the rank of `world` cannot compute where `config` says; empty means it can."""
    if config.device != world.device:
        return [
            Refusal(
                setting="device",
                reason=f'the engine is to compute on "{config.device}", its rank is on "{world.device}"',
                remedy=f"give `{type(config).__name__}.device` and `World.device` the same value",
            )
        ]
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and world.local_rank >= visible:
        return [
            Refusal(
                setting="device",
                reason=f"rank {world.rank} computes on cuda:{world.local_rank}, and its process sees {visible} CUDA devices",
                remedy="use cpu, or run where there are as many GPUs as ranks",
            )
        ]
    return []
