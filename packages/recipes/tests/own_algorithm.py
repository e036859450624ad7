# pyright: basic
"""An algorithm of one's own, as a user writes it in a file: settings, advantages, and a loss that knows nothing of ours."""

from dataclasses import dataclass

import torch

from offbeat_engine import LossOutput, bounded
from offbeat_trainer import Advantage, AlgorithmConfig, GroupPolicyGradient, compute_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnConfig(AlgorithmConfig):
    clip_low: float = bounded(3e-4, at_least=0, at_most=1)
    clip_high: float = bounded(4e-4, at_least=0)


@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    config: OwnConfig

    def __call__(self, predictions, batch, scale):
        mask_BT, advantages_BT = batch["loss_mask"], batch["advantages"]
        logprobs_BT = torch.where(mask_BT, predictions["logprobs"], 0.0)
        old_BT = torch.where(mask_BT, batch.get("old_logprobs", logprobs_BT.detach()), 0.0)
        ratio_BT = (logprobs_BT - old_BT).exp()
        near_BT = ratio_BT.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        gain_BT = torch.minimum(ratio_BT * advantages_BT, near_BT * advantages_BT)
        peak = ratio_BT.detach().max() if len(ratio_BT) else ratio_BT.new_zeros(())
        return LossOutput(loss=-gain_BT.sum() / scale.num_tokens, maxes={"own/ratio_max": peak})


class Own(GroupPolicyGradient[OwnConfig]):
    Config = OwnConfig

    def advantages(self, rewards_NG):
        return compute_advantages(Advantage.GRPO, rewards_NG)

    def loss_fn(self):
        return OwnLoss(config=self.config)
