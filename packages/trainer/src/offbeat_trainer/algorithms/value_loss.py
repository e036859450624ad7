"""What a critic learns from: the clipped value loss and generalized advantage estimation. B = sequences, T = tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat_engine import LossOutput, LossScale
from offbeat_trainer.errors import PlanRefused, TrainerError
from offbeat_trainer.ratios import inside

if TYPE_CHECKING:
    from offbeat_engine import Predictions, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Half the squared error of the values, clipped around the old ones, as an `offbeat_engine.LossFn`.

    Per token 1/2 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2), averaged over the step's tokens: the
    value side of PPO as in its authors' code (github.com/openai/baselines, ppo2). `clip` 0 leaves the plain error. The
    batch holds `returns` and, with a clip, `values` taken before the update.

    `sums` are shares of means over the step's tokens; `value/return_square` and the two beside it are what
    a critic's explained variance is computed from.

    Raises:
        PlanRefused: `clip` is negative (when made).
        TrainerError: the batch lacks what the loss needs, or the engine has no value head (when called).
    """

    clip: float = 0.2

    def __post_init__(self) -> None:
        if not self.clip >= 0:
            raise PlanRefused(f"`clip` of a value loss must be >= 0 (0 = off), got {self.clip}")

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share of the loss."""
        if "values" not in predictions:
            raise TrainerError('a value loss needs an engine whose model has `head: "value"`')
        mask_BT = batch["loss_mask"]
        values_BT = inside(predictions["values"], mask_BT)
        returns_BT = inside(_wanted(batch, "returns"), mask_BT)
        error_BT = (values_BT - returns_BT).square()
        clipped_BT = torch.zeros_like(mask_BT)
        worst_BT = error_BT
        if self.clip:
            old_BT = inside(_wanted(batch, "values"), mask_BT)
            near_BT = old_BT + (values_BT - old_BT).clamp(-self.clip, self.clip)
            near_error_BT = (near_BT - returns_BT).square()
            # Where nothing was clamped, `near_BT` differs from the value by the rounding of a sum.
            clipped_BT = (near_error_BT > error_BT) & ((values_BT - old_BT).abs() > self.clip)
            worst_BT = torch.maximum(error_BT, near_error_BT)
        num_tokens = max(scale.num_tokens, 1)
        sums = {
            "value/mean": values_BT,
            "value/clip_fraction": clipped_BT,
            "value/error_square": error_BT,
            "value/return_mean": returns_BT,
            "value/return_square": returns_BT.square(),
        }
        return LossOutput(
            loss=0.5 * inside(worst_BT, mask_BT).sum() / num_tokens,
            sums={
                key: inside(value.detach().float(), mask_BT).sum() / num_tokens for key, value in sums.items()
            },
        )


def gae(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, *, discount: float, trace: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns [B, T] float32 by GAE (arXiv 1506.02438, equation 16), zero outside the mask.

    delta_t = r_t + discount * V_{t+1} - V_t and A_t = delta_t + discount * trace * A_{t+1}, over the masked tokens of
    each row in order: a token outside the mask (a tool's answer, say) is passed over. After the last, V = A = 0.

    Args:
        rewards_BT: reward of each token; that of a whole completion belongs to its last one.
        values_BT: value of the state before each token, as `predictions["values"]`.
        mask_BT: bool, tokens the policy chose.
        discount: gamma, in 0..1.
        trace: lambda, in 0..1: 0 trusts the values, 1 the rewards.

    Raises:
        PlanRefused: `discount` or `trace` is outside 0..1.
    """
    for name, value in (("discount", discount), ("trace", trace)):
        if not 0 <= value <= 1:
            raise PlanRefused(f"`{name}` of GAE must be in 0..1, got {value}")
    rewards, values = inside(rewards_BT, mask_BT).double(), inside(values_BT, mask_BT).double()
    advantages_BT = torch.zeros_like(rewards)
    next_value_B = rewards.new_zeros(rewards.shape[0])
    next_advantage_B = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        here_B = mask_BT[:, t]
        delta_B = rewards[:, t] + discount * next_value_B - values[:, t]
        advantage_B = delta_B + discount * trace * next_advantage_B
        advantages_BT[:, t] = torch.where(here_B, advantage_B, 0.0)
        next_value_B = torch.where(here_B, values[:, t], next_value_B)
        next_advantage_B = torch.where(here_B, advantage_B, next_advantage_B)
    returns_BT = inside(advantages_BT + values, mask_BT)
    return advantages_BT.float(), returns_BT.float()


def _wanted(batch: TrainBatch, key: str) -> torch.Tensor:
    if key not in batch:
        raise TrainerError(
            f"a value loss needs `{key}` in the batch; compute it with `gae` before the update"
        )
    return batch[key]
