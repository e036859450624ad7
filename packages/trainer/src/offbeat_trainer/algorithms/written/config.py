"""Settings of the algorithms that learn from what is written down."""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from offbeat_engine.config import bounded
from offbeat_trainer.config import AlgorithmConfig


class DpoVariant(StrEnum):
    """The loss of a pair; formulas and sources in `offbeat_trainer.algorithms.written.pairs`."""

    SIGMOID = "sigmoid"
    SIGMOID_NORM = "sigmoid_norm"
    HINGE = "hinge"
    IPO = "ipo"
    ROBUST = "robust"
    EXO = "exo"
    NCA = "nca"
    BCO = "bco"
    SPPO = "sppo"
    APO_ZERO = "apo_zero"
    APO_DOWN = "apo_down"


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(AlgorithmConfig):
    """Supervised training has no settings of its own; `WarmupConfig` says how long and how fast."""

    written_rows: ClassVar[int] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig(AlgorithmConfig):
    """DPO (arXiv 2305.18290): `beta` holds the policy to the reference, `label_smoothing` is the chance that a pair is swapped.

    `sft_coef` weighs the chosen completion's negative log-likelihood per token beside the loss (RPO, arXiv 2404.19733).
    """

    written_rows: ClassVar[int] = 2
    loss: DpoVariant = DpoVariant.SIGMOID
    beta: float = bounded(0.1, more_than=0)
    label_smoothing: float = bounded(0.0, at_least=0, at_most=0.5)
    sft_coef: float = bounded(0.0, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpoConfig(AlgorithmConfig):
    """SimPO (arXiv 2405.14734): `beta` scales mean log-probs per token, `gamma` is the margin that the chosen one must lead by."""

    written_rows: ClassVar[int] = 2
    beta: float = bounded(2.0, more_than=0)
    gamma: float = bounded(1.0, at_least=0)
    sft_coef: float = bounded(0.0, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrpoConfig(AlgorithmConfig):
    """ORPO (arXiv 2403.07691): `odds_coef` weighs the odds ratio beside the likelihood of the chosen completion."""

    written_rows: ClassVar[int] = 2
    odds_coef: float = bounded(0.1, more_than=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpoConfig(AlgorithmConfig):
    """CPO (arXiv 2401.08417)."""

    written_rows: ClassVar[int] = 2
    beta: float = bounded(0.1, more_than=0)  # scales log-probs
    sft_coef: float = bounded(1.0, at_least=0)  # weight of the likelihood of the chosen completion, per token


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoConfig(AlgorithmConfig):
    """KTO (arXiv 2402.01306). The paper keeps weight times count of both kinds within 1 to 4/3 of each other."""

    written_rows: ClassVar[int] = 1
    beta: float = bounded(0.1, more_than=0)  # how firmly the policy is held to the reference
    desirable_weight: float = bounded(1.0, at_least=0)  # weight of completions that are called desirable
    undesirable_weight: float = bounded(1.0, at_least=0)  # weight of those that are called undesirable


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig(AlgorithmConfig):
    """A reward model of pairs (Bradley-Terry)."""

    written_rows: ClassVar[int] = 2
    margin: float = bounded(0.0, at_least=0)  # what the chosen score must lead by
    centre_coef: float = bounded(0.0, at_least=0)
    """weight of the square of the pair's sum, which keeps scores near 0"""
