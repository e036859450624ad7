"""Losses that decide token by token: CISPO, SAPO, DPPO, DRO. Tensors are [B, T]: B sequences, T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.algorithms.policy import configs
from offbeat_trainer.algorithms.policy_loss import Surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from offbeat_trainer.algorithms.policy_loss import Tokens
    from offbeat_trainer.config import AlgorithmConfig


def cispo(ratio: Tensor, advantages: Tensor, tokens: Tokens, config: configs.CispoConfig) -> Surrogate:
    """Return -sg[clip(rho)] A log pi (arXiv 2506.13585, equation 4)."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.scale is configs.CispoScale.ABSOLUTE:
        low, high = 0.0, config.ratio_cap
    loss = -ratio.detach().clamp(low, high) * advantages * tokens.logprobs
    return Surrogate(loss=loss, clipped_low=ratio < low, clipped_high=ratio > high)


class Cispo(Grpo):
    """CISPO (arXiv 2506.13585): a policy gradient whose importance weight is clipped, so that no token loses its gradient.

    loss = -sg[min(rho, ratio_cap)] A log pi with scale=absolute, -sg[clip(rho, 1 - clip_low, 1 + clip_high)] A log pi with
    scale=relative. A is the advantage, rho = pi / pi_old of a token, sg stops the gradient.

    Use it when GRPO's clip drops the rare tokens that start a new thought, over many updates or stale tokens; and not when the
    policy must stay near the old one: nothing stops a token that has moved far.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.CispoConfig
    formula = staticmethod(cispo)


def sapo(ratio: Tensor, advantages: Tensor, tokens: Tokens, config: configs.SapoConfig) -> Surrogate:
    """Return -A 4 / tau sigmoid(tau (rho - 1)), tau by the sign of A (arXiv 2511.20347)."""
    tau = torch.where(advantages > 0, config.temperature_positive, config.temperature_negative)
    return Surrogate(loss=-advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau)


class Sapo(Grpo):
    """SAPO (arXiv 2511.20347): a smooth gate in place of the clip, which lets the gradient of far tokens fade.

    loss = -A 4 / tau sigmoid(tau (rho - 1)), tau = temperature_positive where A > 0, else temperature_negative. A is the
    advantage, rho = pi / pi_old of a token. At rho = 1 its gradient is that of -A log pi.

    Use it when a hard clip makes training jumpy, as with mixtures of experts; and not when a bound on the ratio must hold.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.SapoConfig
    formula = staticmethod(sapo)


def dppo(ratio: Tensor, advantages: Tensor, tokens: Tokens, config: configs.DppoConfig) -> Surrogate:
    """Return -sg[min(rho, ratio_cap)] A log pi, zero where A pushes a token further out (arXiv 2602.04879)."""
    log_new, log_old = tokens.logprobs.detach(), tokens.old_logprobs
    new, old = log_new.exp(), log_old.exp()
    far = (new - old).abs()
    if config.divergence is configs.Divergence.KL:
        others_old, others_new = (torch.log1p(-p.clamp(max=1 - 1e-7)) for p in (old, new))
        far = old * (log_old - log_new) + (1 - old) * (others_old - others_new)
    low = (advantages < 0) & (new < old) & (far > config.clip_low)
    high = (advantages > 0) & (new > old) & (far > config.clip_high)
    loss = -ratio.detach().clamp(max=config.ratio_cap) * advantages * tokens.logprobs
    return Surrogate(loss=loss.masked_fill(low | high, 0.0), clipped_low=low, clipped_high=high)


class Dppo(Grpo):
    """DPPO (arXiv 2602.04879): a trust region of probabilities, not of their ratio, decides which tokens are left out.

    loss = -sg[min(rho, ratio_cap)] A log pi, or 0 where A > 0, pi > pi_old and D > clip_high, or A < 0, pi < pi_old and D >
    clip_low. D = |pi - pi_old| with divergence=tv, pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi)) with kl.
    A is the advantage, rho = pi / pi_old of a token, pi_old the sampler, sg stops the gradient.

    Use it when sampler and trainer differ, or tokens are a few versions old: unlikely tokens may move, likely ones are held; and
    not when the old policy is far away, since no bound on the ratio is left but ratio_cap.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.DppoConfig
    formula = staticmethod(dppo)


def dro(ratio: Tensor, advantages: Tensor, tokens: Tokens, config: configs.DroConfig) -> Surrogate:
    """Return -(A log pi - beta / 2 (log pi - log pi_old)^2) (after arXiv 2405.19107)."""
    square = (tokens.logprobs - tokens.old_logprobs).square()
    return Surrogate(loss=-advantages * tokens.logprobs + config.beta / 2 * square)


class Dro(Grpo):
    """DRO (arXiv 2405.19107): a policy gradient without importance weight, held by the square of the log ratio.

    loss = -(A log pi - beta / 2 (log pi - log pi_old)^2). A is the advantage, pi_old the policy that a ratio is taken against.

    Use it when completions are not to be weighed, as in offline data at a small rate; and not when many updates need a clip: in a
    published comparison on GSM8K it learned far less than PPO's loss.
    """

    Config: ClassVar[type[AlgorithmConfig]] = configs.DroConfig
    formula = staticmethod(dro)
