"""What a test of an engine needs: tiny models, real ranks, and a plain reference to compare with."""

from __future__ import annotations

from offbeat_engine.testing.models import make_tiny_model, random_batch
from offbeat_engine.testing.ranks import RankPool, RanksError, run_ranks
from offbeat_engine.testing.reference import Reference, reference_logprobs, reference_step, relative_error

__all__ = [
    "RankPool",
    "RanksError",
    "Reference",
    "make_tiny_model",
    "random_batch",
    "reference_logprobs",
    "reference_step",
    "relative_error",
    "run_ranks",
]
