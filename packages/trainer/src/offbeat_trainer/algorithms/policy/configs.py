"""Settings of the policy losses: GRPO's with the defaults of each paper. This module imports no torch.

What tokens of older weights are worth (`proximal`, `correction*`) is GRPO's, but where a paper takes its ratio against the sampler.
"""

# No `from __future__ import annotations` here: pydantic reads these annotations at run time.

from dataclasses import dataclass, field
from enum import StrEnum

from offbeat_engine.config import bounded
from offbeat_trainer.config import UNUSED, Advantage, Aggregation, GrpoConfig, Proximal

_OF_THE_PAPER = {"derived": "algorithm.name, the algorithm, whose paper has this value"}


class CispoScale(StrEnum):
    """What bounds CISPO's weight: `ratio_cap` (TRL, ScaleRL), or 1 - `clip_low` .. 1 + `clip_high` (verl, NeMo-RL)."""

    ABSOLUTE = "absolute"
    RELATIVE = "relative"


class Divergence(StrEnum):
    """What DPPO measures between two policies that choose the sampled token or another: total variation, or KL(old || new)."""

    TV = "tv"
    KL = "kl"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnclippedConfig(GrpoConfig):
    """That of a loss that clips no ratio."""

    clip_low: float = field(default=0.2, metadata=UNUSED)
    clip_high: float = field(default=0.28, metadata=UNUSED)
    dual_clip: float = field(default=0.0, metadata=UNUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAdvantageConfig(GrpoConfig):
    """That of an algorithm with advantages of its own, one for a completion."""

    advantage: Advantage = field(default=Advantage.GRPO, metadata=UNUSED)
    per_turn: bool = field(default=False, metadata=UNUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class GdpoConfig(OwnAdvantageConfig):
    """GDPO (arXiv 2601.05242); `part_weights` weigh the normalised rewards by name, 1 where one is not named."""

    part_weights: dict[str, float] = field(default_factory=dict[str, float], metadata={"free": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoConfig(GrpoConfig):
    """CISPO (arXiv 2506.13585); the cap is ScaleRL's (arXiv 2510.13786)."""

    scale: CispoScale = CispoScale.ABSOLUTE
    ratio_cap: float = bounded(5.0, more_than=0)  # largest weight of scale=absolute
    clip_low: float = bounded(1.0, at_least=0)
    clip_high: float = bounded(0.2, at_least=0)
    dual_clip: float = field(default=0.0, metadata=UNUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoConfig(UnclippedConfig):
    """SAPO (arXiv 2511.20347)."""

    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN
    temperature_positive: float = bounded(1.0, more_than=0)  # steepness of the gate where A > 0
    temperature_negative: float = bounded(1.05, more_than=0)  # and where A <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoConfig(GrpoConfig):
    """DPPO (arXiv 2602.04879); `clip_low` and `clip_high` bound the divergence."""

    proximal: Proximal = Proximal.ROLLOUT
    divergence: Divergence = Divergence.TV  # what the bounds are of
    clip_high: float = bounded(0.2, at_least=0)
    dual_clip: float = field(default=0.0, metadata=UNUSED)
    ratio_cap: float = bounded(20.0, more_than=0)  # largest weight of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class DroConfig(UnclippedConfig):
    """DRO (arXiv 2405.19107), with the advantages of groups for its value function."""

    beta: float = bounded(0.05, more_than=0)  # weight of the squared log ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoConfig(GrpoConfig):
    """GSPO (arXiv 2507.18071, section 5.1)."""

    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN
    clip_low: float = bounded(3e-4, at_least=0)
    clip_high: float = bounded(4e-4, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LuspoConfig(GspoConfig):
    """LUSPO (arXiv 2602.05261)."""

    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_SUM
    clip_low: float = bounded(2e-3, at_least=0)
    clip_high: float = bounded(2.5e-3, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GmpoConfig(GrpoConfig):
    """GMPO (arXiv 2507.20673); its bounds are of the log ratio."""

    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN
    clip_low: float = bounded(0.4, at_least=0)
    clip_high: float = bounded(0.4, at_least=0)
    dual_clip: float = field(default=0.0, metadata=UNUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class VespoConfig(UnclippedConfig):
    """VESPO (arXiv 2602.10693)."""

    proximal: Proximal = Proximal.ROLLOUT
    k_positive: float = bounded(2.0, at_least=0)  # how fast the weight falls below ratio 1 where A >= 0
    lambda_positive: float = bounded(3.0, at_least=0)  # how fast it falls above ratio 1 where A >= 0
    k_negative: float = bounded(3.0, at_least=0)  # `k_positive` where A < 0
    lambda_negative: float = bounded(2.0, at_least=0)  # `lambda_positive` where A < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsmConfig(GrpoConfig):
    """Off-policy sequence masking (arXiv 2512.02556, section 3.1); the threshold is slime's, the paper names none."""

    proximal: Proximal = Proximal.ROLLOUT
    threshold: float = bounded(1e-4, at_least=0)  # largest mean log ratio old / new of a bad sequence, nats


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCovConfig(GrpoConfig):
    """Clip-Cov (arXiv 2505.22617)."""

    clip_high: float = bounded(0.2, at_least=0)
    fraction: float = bounded(2e-4, at_least=0, at_most=1)  # tokens left out
    covariance_low: float = field(
        default=1.0, metadata=_OF_THE_PAPER
    )  # those left out have a larger covariance
    covariance_high: float = field(default=5.0, metadata=_OF_THE_PAPER)  # and a smaller one


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCovConfig(UnclippedConfig):
    """KL-Cov (arXiv 2505.22617)."""

    fraction: float = bounded(2e-4, at_least=0, at_most=1)  # tokens held back
    penalty: float = bounded(1.0, at_least=0)  # weight of |log ratio| of a token that is held back


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poConfig(UnclippedConfig):
    """M2PO (arXiv 2510.01161)."""

    proximal: Proximal = Proximal.ROLLOUT
    threshold: float = bounded(0.04, at_least=0)  # largest mean square of the log ratio
