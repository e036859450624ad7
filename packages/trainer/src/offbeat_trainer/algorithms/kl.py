"""Schulman's estimators of KL(policy || reference) from tokens that the policy sampled (joschu.net/blog/kl-approx.html).

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
"""

from __future__ import annotations

from typing import assert_never

import torch

from offbeat_trainer.config import KlEstimator

MAX_LOG_RATIO = 20.0
"""Beyond exp(20) a ratio says only "far away"; capping there keeps float32 sums finite."""


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
