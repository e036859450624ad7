"""What a test of an engine needs: the conformance suite, tiny models, real ranks, and a plain reference."""

from __future__ import annotations

from offbeat_engine.testing.models import (
    FAMILIES,
    FakeCuda,
    Family,
    Variant,
    make_tiny_model,
    pretend_on_cuda,
    random_batch,
)
from offbeat_engine.testing.ranks import RankPool, RanksError, run_ranks
from offbeat_engine.testing.reference import Reference, reference_logprobs, reference_step, relative_error
from offbeat_engine.testing.runner import Tolerances
from offbeat_engine.testing.suite import conformance

__all__ = [
    "FAMILIES",
    "FakeCuda",
    "Family",
    "RankPool",
    "RanksError",
    "Reference",
    "Tolerances",
    "Variant",
    "conformance",
    "make_tiny_model",
    "pretend_on_cuda",
    "random_batch",
    "reference_logprobs",
    "reference_step",
    "relative_error",
    "run_ranks",
]
