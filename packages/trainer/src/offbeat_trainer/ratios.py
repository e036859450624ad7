"""Ratios of two policies, per token: how far the policy is from a reference, and what to do about tokens that another one sampled.

B = sequences, T = tokens.

**KL.** Schulman's estimators of KL(policy || reference) from tokens that the policy sampled (joschu.net/blog/kl-approx.html).
`log_ratio` is log reference - log policy, per token, nats. As *numbers*, k1 and k3 are unbiased and k2 is nearly so;
k1 alone can be negative and k3 varies the least. As *losses*, what matters is the expected gradient through the
policy's log-probability while the tokens stay fixed, and there they are three different things:

- k1: the score function, zero on average. It adds noise and no pull to the reference. Use it to watch, not to train.
- k2: the gradient of KL(policy || reference), the quantity usually meant.
- k3: the gradient of KL(reference || policy), the KL the other way round; gentle where the policy has left the
  reference's support (GRPO's choice, arXiv 2402.03300).

All of these expect tokens of the policy itself. Of tokens that older weights sampled they pull as if those weights were the
policy; `PolicyLoss` does not weigh them. "unbiased" is k3 times policy / sampler, with the gradient of that ratio (DeepSeek-V3.2,
arXiv 2512.02556, section 3.1): its expected gradient is that of KL(policy || reference), whoever sampled.
tests/algorithms/test_kl.py holds these sentences against exact expectations over a small vocabulary.

**Importance weights** trainer / sampler, cut where they run wild. Three policies matter. The *sampler* made the tokens: older
weights, and an engine that rounds differently. The *proximal* policy is the trainer's own before the step. The *current* one is
being trained. Decoupled PPO (Hilton et al., "Batch size-invariance for policy optimization", arXiv 2110.00641; for asynchronous
runs AReaL, arXiv 2505.24298, section 5.2) clips current / proximal and weighs each sample by proximal / sampler. Exact weights
leave the gradient unbiased and their variance grows with every version and every token; `correct` trades a little bias for much
less of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import torch

from offbeat_trainer.config import Correction, CorrectionLevel, KlEstimator

if TYPE_CHECKING:
    from collections.abc import Mapping

RATIO_MEAN = "offpolicy/ratio_mean"
RATIO_SQUARE_MEAN = "offpolicy/ratio_square_mean"
ESS = "offpolicy/ess_fraction"
MAX_LOG_RATIO = 20.0
"""Beyond exp(20) a ratio says only "far away"; capping there keeps float32 sums finite."""


def inside(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return `values_BT` under `mask_BT` and zero elsewhere, in value and in gradient.

    A product with the mask would turn infinity outside it into NaN.
    """
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))


def peak(values_BT: torch.Tensor) -> torch.Tensor:
    """Return the maximum; zero, the least a ratio or a distance can be, where there is nothing."""
    return values_BT.max() if values_BT.numel() else values_BT.new_zeros(())


def k1(log_ratio: torch.Tensor) -> torch.Tensor:
    """Unbiased, of high variance, of either sign."""
    return -log_ratio


def k2(log_ratio: torch.Tensor) -> torch.Tensor:
    """Non-negative, slightly biased, of low variance."""
    return log_ratio.square() / 2


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Non-negative, unbiased, of low variance; `log_ratio` is capped at `MAX_LOG_RATIO`."""
    capped = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(capped) - capped  # expm1: exp(x) - 1 - x loses every digit near 0


def kl_estimate(kind: KlEstimator, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the estimate of KL(policy || reference) per token in nats, any shape."""
    log_ratio = ref_logprobs - logprobs
    match kind:
        case KlEstimator.K1:
            return k1(log_ratio)
        case KlEstimator.K2:
            return k2(log_ratio)
        case KlEstimator.K3 | KlEstimator.UNBIASED:  # whose weight is known to the loss
            return k3(log_ratio)
        case _:
            assert_never(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights per token, and where which bound changed them (bool). `ratio` is the weight before any bound."""

    weight: torch.Tensor
    ratio: torch.Tensor
    truncated: torch.Tensor
    masked: torch.Tensor


def importance_ratios(
    level: CorrectionLevel, proximal_BT: torch.Tensor, sampler_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return the ratio proximal / sampler [B, T] at `level`, 1 outside the mask; logs are capped to +-20.

    - token: each token's own. Ignores that earlier tokens were off-policy, too (biased, of low variance).
    - sequence: the product over the completion (unbiased, of a variance that grows exponentially with its length).
    - geometric: its T-th root, the length-normalised ratio of GSPO (arXiv 2507.18071, equation 7): how far the
      completion as a whole is off per token.
    """
    log_ratio_BT = inside(proximal_BT - sampler_BT, mask_BT)
    match level:
        case CorrectionLevel.TOKEN:
            log_BT = log_ratio_BT
        case CorrectionLevel.SEQUENCE:
            log_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
        case CorrectionLevel.GEOMETRIC:
            length_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
            log_BT = (log_ratio_BT.sum(-1, keepdim=True) / length_B1).expand_as(log_ratio_BT)
        case _:
            assert_never(level)
    return inside(log_BT, mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncate(ratio: torch.Tensor, high: float) -> Weights:
    """Return min(ratio, high): truncated importance sampling (Ionides, J. Comp. Graph. Stat. 17, 2008, section 2).

    For language models as TIS (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025). Every token keeps a voice; those the sampler found too unlikely are heard less than they should be.
    """
    return Weights(
        weight=ratio.clamp(max=high),
        ratio=ratio,
        truncated=ratio > high,
        masked=torch.zeros_like(ratio, dtype=torch.bool),
    )


def mask_above(ratio: torch.Tensor, high: float) -> Weights:
    """Return the ratio where it is at most `high`, else 0: masked importance sampling.

    (Liu et al., "When speed kills stability: demystifying RL collapse from the training-inference mismatch", 2025.)
    What the sampler would hardly have made is taken for an error, not for a rare chance.
    """
    masked = ratio > high
    return Weights(
        weight=ratio.masked_fill(masked, 0.0), ratio=ratio, truncated=torch.zeros_like(masked), masked=masked
    )


def mask_outside(ratio: torch.Tensor, low: float, high: float) -> Weights:
    """Return the ratio where it lies in low .. high, else 0 (IcePop; Ring-1T, arXiv 2510.18855, section on IcePop).

    The lower bound also leaves out tokens that the trainer would hardly make: their weight is small, but what they are
    there for is the mismatch of two engines.
    """
    masked = (ratio < low) | (ratio > high)
    return Weights(
        weight=ratio.masked_fill(masked, 0.0), ratio=ratio, truncated=torch.zeros_like(masked), masked=masked
    )


def correct(kind: Correction, ratio: torch.Tensor, low: float, high: float) -> Weights:
    """Return the weights that `kind` makes of `ratio`, any shape."""
    match kind:
        case Correction.NONE:
            no = torch.zeros_like(ratio, dtype=torch.bool)
            return Weights(weight=torch.ones_like(ratio), ratio=ratio, truncated=no, masked=no)
        case Correction.TRUNCATE:
            return truncate(ratio, high)
        case Correction.MASK:
            return mask_above(ratio, high)
        case Correction.ICEPOP:
            return mask_outside(ratio, low, high)
        case _:
            assert_never(kind)


def ess_fraction(ratio_mean: float, ratio_square_mean: float) -> float:
    """Return the effective sample size per sample, (mean r)^2 / mean r^2 (Kish, "Survey sampling", 1965, section 11.7).

    1: as good as fresh samples; 0.5: half of them are wasted. Means can be joined over micro-batches and ranks, this
    cannot: it is computed once the means are whole.
    """
    return ratio_mean**2 / ratio_square_mean if ratio_square_mean > 0 else float("nan")


def derived(sums: Mapping[str, float]) -> dict[str, float]:
    """Return what follows from the whole sums of a step: the effective sample size where its parts are there."""
    if RATIO_MEAN not in sums:
        return {}
    return {ESS: ess_fraction(sums[RATIO_MEAN], sums[RATIO_SQUARE_MEAN])}
