"""GSPO (arXiv 2507.18071) as an algorithm of one's own: `offbeat-train algorithm=examples/gspo.py:Gspo`.

One importance ratio per completion, the geometric mean of its tokens' ratios, is clipped as a whole. B = completions, T = tokens.
"""

from dataclasses import dataclass

import torch

from offbeat_engine import LossOutput, bounded
from offbeat_trainer import AlgorithmConfig, GroupPolicyGradient
from offbeat_trainer.algorithms.grpo import grpo


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoConfig(AlgorithmConfig):
    """Bounds of the ratio of a completion, 1 - clip_low .. 1 + clip_high: section 5.1 of the paper."""

    clip_low: float = bounded(3e-4, at_least=0, at_most=1)
    clip_high: float = bounded(4e-4, at_least=0)


@dataclass(frozen=True, kw_only=True)
class GspoLoss:
    """The mean over completions of -min(s A, clip(s) A), equations 5 to 7, where s = exp(mean over tokens of log ratio)."""

    config: GspoConfig

    def __call__(self, predictions, batch, scale):
        """Return a micro-batch's share of the loss."""
        mask_BT = batch["loss_mask"]
        logprobs_BT = torch.where(mask_BT, predictions["logprobs"], 0.0)
        old_BT = torch.where(mask_BT, batch.get("old_logprobs", logprobs_BT.detach()), 0.0)
        tokens_B = mask_BT.sum(-1).clamp(min=1)
        ratio_B = ((logprobs_BT - old_BT).sum(-1) / tokens_B).exp()
        advantage_B = batch["advantages"].sum(-1) / tokens_B  # every token of a completion has the same
        clipped_B = ratio_B.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        loss_B = torch.maximum(-ratio_B * advantage_B, -clipped_B * advantage_B)
        cut_B = loss_B > -ratio_B * advantage_B
        num_sequences = max(scale.num_sequences, 1)
        return LossOutput(
            loss=loss_B.sum() / num_sequences,
            sums={"gspo/clip_fraction": cut_B.sum() / num_sequences},
            maxes={"gspo/ratio_max": ratio_B.detach().max() if len(ratio_B) else ratio_B.new_zeros(())},
        )


class Gspo(GroupPolicyGradient[GspoConfig]):
    """Advantages as GRPO has them, and the loss above."""

    Config = GspoConfig

    def advantages(self, rewards_NG):
        """Return them, centred and scaled within each group."""
        return grpo(rewards_NG)

    def loss_fn(self):
        """Return the loss."""
        return GspoLoss(config=self.config)
