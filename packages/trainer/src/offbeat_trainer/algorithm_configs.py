"""Settings of the algorithms that learn from what is written down, or from a teacher."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.
from dataclasses import dataclass
from typing import ClassVar

from offbeat_engine.config import bounded
from offbeat_trainer.config import AlgorithmConfig, PolicyLossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(AlgorithmConfig):
    """Supervised training has no settings of its own; `WarmupConfig` says how long and how fast."""

    written_rows: ClassVar[int] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig(AlgorithmConfig):
    """DPO (arXiv 2305.18290): `beta` holds the policy to the reference, `label_smoothing` is the chance that a pair is swapped."""

    written_rows: ClassVar[int] = 2
    beta: float = bounded(0.1, more_than=0)
    label_smoothing: float = bounded(0.0, at_least=0, at_most=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig(PolicyLossConfig):
    """On-policy distillation; `offbeat_trainer.algorithms.distill` has the formula.

    `teacher_path` is the Hugging Face folder of a model with the policy's vocabulary. `gain_clip` bounds log teacher - log policy of
    a token on both sides (0 = off).
    """

    clip_high: float = bounded(0.2, at_least=0)
    teacher_path: str = ""
    gain_clip: float = bounded(0.0, at_least=0)
