"""The Megatron engine: Hugging Face causal models on megatron-core, in tensor, pipeline, context, expert and data parallel layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_engine.megatron.config import MegatronConfig

if TYPE_CHECKING:
    from offbeat_engine.megatron.engine import MegatronEngine


def __getattr__(name: str) -> object:
    # The engine imports torch; who only reads its settings does not.
    if name != "MegatronEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from offbeat_engine.megatron.engine import MegatronEngine

    return MegatronEngine


__all__ = ["MegatronConfig", "MegatronEngine"]
