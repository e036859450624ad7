"""The FSDP2 engine: Hugging Face causal models, sharded with `fully_shard`."""

from __future__ import annotations

from offbeat_engine.fsdp2.engine import Fsdp2Engine

__all__ = ["Fsdp2Engine"]
