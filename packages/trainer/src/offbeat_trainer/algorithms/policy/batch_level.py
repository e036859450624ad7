"""Losses that choose tokens over the whole batch of a step: Clip-Cov, KL-Cov, M2PO.

Tensors are [B, T], B sequences, T tokens, or [N], N tokens of the batch. What is chosen depends on the tokens alone: their order,
padding, ranks and micro-batches change nothing, but among tokens that are equal in every number, or at a bound but for rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.algorithms.policy import configs
from offbeat_trainer.algorithms.policy_loss import Surrogate, clip
from offbeat_trainer.errors import TrainerError

if TYPE_CHECKING:
    from torch import Tensor

    from offbeat_engine import TrainBatch
    from offbeat_trainer.algorithms.policy_loss import Tokens
    from offbeat_trainer.config import AlgorithmConfig


def chosen(tokens: Tokens) -> Tensor:
    """Return the tokens that were chosen; `TrainerError` where nobody did."""
    if tokens.chosen is None:
        raise TrainerError(
            "no tokens were chosen over the whole step; train by `learn`, not by the loss alone"
        )
    return tokens.chosen


def left_out(plain: Surrogate, tokens: Tokens) -> Surrogate:
    """Return `plain`, zero at the chosen tokens."""
    masked = chosen(tokens)
    return replace(plain, loss=plain.loss.masked_fill(masked, 0.0), masked=masked)


def covariances(batch: TrainBatch, logprobs: Tensor) -> Tensor:
    """Return (A - mean A)(log pi - mean log pi) float64, means over the step's tokens (arXiv 2505.22617)."""
    pair = (batch["advantages"].double(), logprobs.double())
    advantages, logprobs = (one - one[batch["loss_mask"]].mean() for one in pair)
    return advantages * logprobs


def top_tokens(scores: Tensor, candidates: Tensor, count: float) -> Tensor:
    """Return where the `count` largest scores of `candidates` are, one at least, if there are so many."""
    count = min(max(int(count), 1), int(candidates.sum()))
    best = scores.double().masked_fill(~candidates, -torch.inf).flatten().topk(count).indices
    return torch.isin(torch.arange(scores.numel()), best).view_as(candidates)


def clip_cov(ratio: Tensor, advantages: Tensor, tokens: Tokens, config: configs.ClipCovConfig) -> Surrogate:
    """Return the clipped surrogate, zero at the chosen tokens (arXiv 2505.22617)."""
    return left_out(clip(ratio, advantages, tokens, config), tokens)


class ClipCov(Grpo):
    """Clip-Cov (arXiv 2505.22617): a few tokens at random, of those whose update would lower the entropy most, are left out.

    loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), or 0 at the chosen tokens: a `fraction` of the step's, at random,
    with covariance_low < (A - mean A)(log pi - mean log pi) < covariance_high, pi from before the step. A is the advantage, rho =
    pi / pi_old of a token. What stands for chance are the bits of the sampler's log-probs. The choice costs a forward pass.

    Use it when entropy falls to 0 while the reward still grows; and not when batches are so small that one token is more than
    the fraction.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.ClipCovConfig
    formula = staticmethod(clip_cov)
    chooses = True

    def choose(self, batch: TrainBatch, logprobs: Tensor) -> Tensor:
        """See `GroupPolicyGradient.choose`."""
        config, covariance, mask = self.config, covariances(batch, logprobs), batch["loss_mask"]
        assert isinstance(config, configs.ClipCovConfig)
        near = mask & (covariance > config.covariance_low) & (covariance < config.covariance_high)
        # Chance that is alike however the batch lies: the sampler's log-probs, scattered by Knuth's multiplicative hash.
        # The trainer's would not do: their last bits differ with ranks and micro-batches.
        lots = batch["rollout_logprobs"].float().contiguous().view(torch.int32).long() * 2654435761 % 2**32
        return top_tokens(lots, near, config.fraction * int(mask.sum()))


def kl_cov(ratio: Tensor, advantages: Tensor, tokens: Tokens, config: configs.KlCovConfig) -> Surrogate:
    """Return -rho A, with penalty |log rho| on top at the chosen tokens (arXiv 2505.22617)."""
    held, far = chosen(tokens), (tokens.logprobs - tokens.old_logprobs).abs()
    return Surrogate(loss=-ratio * advantages + config.penalty * far * held, masked=held)


class KlCov(Grpo):
    """KL-Cov (arXiv 2505.22617): the few tokens whose update would lower the entropy most are held to the old policy.

    loss = -rho A, plus penalty |log rho| at the chosen tokens: the `fraction` of the step's with the largest (A - mean A)(log pi -
    mean log pi), pi from before the step. A is the advantage, rho = pi / pi_old of a token. The choice costs a forward pass.

    Use it when entropy falls to 0, with several updates a step; and not when there is one update, of fresh tokens: rho is 1 there,
    and the penalty has no gradient.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.KlCovConfig
    formula = staticmethod(kl_cov)
    chooses = True

    def choose(self, batch: TrainBatch, logprobs: Tensor) -> Tensor:
        """See `GroupPolicyGradient.choose`."""
        assert isinstance(self.config, configs.KlCovConfig)
        mask = batch["loss_mask"]
        return top_tokens(covariances(batch, logprobs), mask, self.config.fraction * int(mask.sum()))


def m2po(ratio: Tensor, advantages: Tensor, tokens: Tokens, config: configs.M2poConfig) -> Surrogate:
    """Return -rho A, zero at the chosen tokens (arXiv 2510.01161)."""
    return left_out(Surrogate(loss=-ratio * advantages), tokens)


class M2po(Grpo):
    """M2PO (arXiv 2510.01161): no clip; the fewest tokens are left out that bring the second moment of the log ratio to a bound.

    loss = -rho A, or 0 at the chosen tokens: those of the largest (log rho)^2, until the mean of the others is at most threshold.
    Tokens with A log rho > 0 alone count, over the step, rho from before it. A is the advantage, rho = pi / pi_old of a token,
    pi_old the sampler. The choice costs a forward pass.

    Use it when tokens are many versions old and GRPO's clip drops too many of them; and not when fresh tokens get several updates
    a step: rho is measured before them, and nothing else bounds it.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.M2poConfig
    formula = staticmethod(m2po)
    chooses = True

    def choose(self, batch: TrainBatch, logprobs: Tensor) -> Tensor:
        """See `GroupPolicyGradient.choose`; algorithm 1 of the paper."""
        assert isinstance(self.config, configs.M2poConfig)
        log_ratio, mask = logprobs - batch["rollout_logprobs"], batch["loss_mask"]
        outward = mask & (batch["advantages"] * log_ratio > 0)
        square_N, order_N = log_ratio[outward].double().square().sort()
        mean_N = square_N.cumsum(0) / torch.arange(1, len(square_N) + 1)
        over_N = (mean_N > self.config.threshold)[order_N.argsort()]
        return torch.zeros_like(mask).masked_scatter(outward, over_N)
