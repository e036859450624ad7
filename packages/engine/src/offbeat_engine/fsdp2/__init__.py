"""The FSDP2 engine: Hugging Face causal models, sharded with `fully_shard`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_engine.fsdp2.config import Fsdp2Config

if TYPE_CHECKING:
    from offbeat_engine.fsdp2.engine import Fsdp2Engine


def __getattr__(name: str) -> object:
    # The engine imports torch and transformers; who only reads its settings does not.
    if name != "Fsdp2Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from offbeat_engine.fsdp2.engine import Fsdp2Engine

    return Fsdp2Engine


__all__ = ["Fsdp2Config", "Fsdp2Engine"]
