"""The SGLang adapter. SGLang itself runs in processes of its own, in an environment of its own, and is never imported here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from offbeat_rollout.sglang.config import SglangConfig

if TYPE_CHECKING:
    from offbeat_rollout.sglang.engine import SglangEngine

__all__ = ["SglangConfig", "SglangEngine"]


def __getattr__(name: str) -> object:
    if name != "SglangEngine":  # whoever reads settings needs no arrays
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("offbeat_rollout.sglang.engine").SglangEngine
