"""The Transformers adapter: slower than a serving engine, always there, and exact."""

from __future__ import annotations

from offbeat_rollout.hf.engine import HfEngine

__all__ = ["HfEngine"]
