"""Losses that weigh or leave out whole sequences: GSPO, LUSPO, GMPO, VESPO, OPSM. Tensors are [B, T]: B sequences, T tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.algorithms.policy import configs
from offbeat_trainer.algorithms.policy_loss import Surrogate, clip, importance_ratios
from offbeat_trainer.config import CorrectionLevel

if TYPE_CHECKING:
    from torch import Tensor

    from offbeat_trainer.algorithms.policy_loss import Tokens
    from offbeat_trainer.config import AlgorithmConfig


def sequence_ratio(tokens: Tokens, level: CorrectionLevel = CorrectionLevel.GEOMETRIC) -> Tensor:
    """Return the ratio of whole sequences, the same at each of their tokens, without gradient."""
    return importance_ratios(level, tokens.logprobs.detach(), tokens.old_logprobs, tokens.mask)


def gspo(ratio: Tensor, advantages: Tensor, tokens: Tokens, config: configs.GspoConfig) -> Surrogate:
    """Return -min(s A, clip(s) A), s = sg[s] pi / sg[pi] (GSPO-token, arXiv 2507.18071, section 4.3)."""
    through = (tokens.logprobs - tokens.logprobs.detach()).exp()
    return clip(sequence_ratio(tokens) * through, advantages, tokens, config)


class Gspo(Grpo):
    """GSPO (arXiv 2507.18071): one importance ratio per completion, the geometric mean of its tokens', is clipped as a whole.

    loss = -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A), mean over tokens, then over sequences. s_t = sg[s] pi_t /
    sg[pi_t], s = exp(mean over tokens of log(pi_t / pi_old_t)), A the advantage, sg stops the gradient.

    Use it when rewards are of whole completions and ratios of single tokens are noisy, as with mixtures of experts; and not when
    turns have advantages that differ much, since all tokens of a sequence share one ratio.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.GspoConfig
    formula = staticmethod(gspo)


class Luspo(Gspo):
    """LUSPO (arXiv 2602.05261): GSPO with each sequence weighed by its length, so that short answers are not favoured.

    loss = -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A), sum over tokens, then mean over sequences; s_t, A as in GSPO.

    Use it when completions shrink under GSPO while longer ones would be better; and not when lengths differ a hundredfold, since
    the longest then make the step.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.LuspoConfig


def gmpo(ratio: Tensor, advantages: Tensor, tokens: Tokens, config: configs.GmpoConfig) -> Surrogate:
    """Return -A sg[s] exp(l - sg[l]), l = log rho cut where A pushes, s = exp(mean l) (arXiv 2507.20673)."""
    far, low, high = tokens.logprobs - tokens.old_logprobs, config.clip_low, config.clip_high
    cut = torch.where(advantages > 0, far.clamp(max=high), far.clamp(min=-low))
    mean = sequence_ratio(replace(tokens, logprobs=cut, old_logprobs=torch.zeros_like(cut)))
    return Surrogate(
        loss=-advantages * mean * (cut - cut.detach()).exp(),
        clipped_low=(advantages < 0) & (far < -low),
        clipped_high=(advantages > 0) & (far > high),
    )


class Gmpo(Grpo):
    """GMPO (arXiv 2507.20673): the geometric mean of a completion's clipped token ratios takes the place of their mean.

    loss = -s A, mean over sequences, s = exp(mean over tokens of l_t), l_t = min(log rho_t, clip_high) where A > 0, else
    max(log rho_t, -clip_low). A is the advantage, rho_t = pi_t / pi_old_t. Its aggregation makes it
    the paper's.

    Use it when single tokens of a large ratio drive GRPO's updates: its clip may be wide; and not when tokens are of much older
    weights, whose product of ratios it hides in a mean.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.GmpoConfig
    formula = staticmethod(gmpo)


def vespo(ratio: Tensor, advantages: Tensor, tokens: Tokens, config: configs.VespoConfig) -> Surrogate:
    """Return -sg[phi(W)] A log pi, phi(W) = e^lambda W^k e^(-lambda W) (arXiv 2602.10693)."""
    up, product = advantages >= 0, sequence_ratio(tokens, CorrectionLevel.SEQUENCE)
    k = torch.where(up, config.k_positive, config.k_negative)
    decay = torch.where(up, config.lambda_positive, config.lambda_negative)
    weight = (decay + k * product.log() - decay * product).exp()
    return Surrogate(loss=-weight * advantages * tokens.logprobs)


class Vespo(Grpo):
    """VESPO (arXiv 2602.10693): a policy gradient weighed by a smooth function of the ratio of the whole completion.

    loss = -sg[phi(W)] A log pi, phi(W) = exp(lambda) W^k exp(-lambda W), W = product over tokens of pi / pi_old. k, lambda are the
    positive settings where the advantage A >= 0, else the negative; pi_old is the sampler, sg stops the gradient; phi(1) = 1.

    Use it when tokens are many versions old and completions short; and not when they are long and the engines differ, since the
    product then leaves 1 by rounding alone and few completions keep a weight.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.VespoConfig
    formula = staticmethod(vespo)


def opsm(ratio: Tensor, advantages: Tensor, tokens: Tokens, config: configs.OpsmConfig) -> Surrogate:
    """Return the clipped surrogate, zero in bad sequences that the policy has left (arXiv 2512.02556, section 3.1)."""
    plain = clip(ratio, advantages, tokens, config)
    masked = (advantages < 0) & (-sequence_ratio(tokens).log() > config.threshold)
    return replace(plain, loss=plain.loss.masked_fill(masked, 0.0), masked=masked)


class Opsm(Grpo):
    """OPSM (arXiv 2512.02556): GRPO that leaves out bad completions which the policy has left behind.

    loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), or 0 where A < 0 and the mean over the sequence's tokens of
    log(pi_old / pi) > threshold. A is the advantage, rho = pi / pi_old of a token, pi_old the sampler.

    Use it when stale completions of negative advantage make training unstable; and not when the threshold is below the difference
    of the engines themselves (mismatch/mean_abs_logprob_diff): half of what is to be unlearned would be left out.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.OpsmConfig
    formula = staticmethod(opsm)
