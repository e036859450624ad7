"""Loss functions of the conformance suite: every token has its own weight, so that none can stand in for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat_engine.values import LossOutput

if TYPE_CHECKING:
    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.values import LossFn, LossScale, Predictions

POISON = 63
"""The token whose presence makes `PoisonedLoss` misbehave."""


@dataclass(frozen=True, slots=True)
class WeightedLoss:
    """Negative log-likelihood weighted by `advantages`, a mean over sequences, and entropy, all with gradient."""

    entropy_gradient: bool = True

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share: both counts of `scale` are divided by."""
        mask_BT = batch["loss_mask"]
        nll_BT = -predictions["logprobs"] * mask_BT
        per_token = (batch["advantages"] * nll_BT).sum() + 0.1 * (predictions["entropy"] * mask_BT).sum()
        mean_B = nll_BT.sum(1) / mask_BT.sum(1).clamp(min=1)
        loss = per_token / scale.num_tokens + 0.1 * mean_B.sum() / scale.num_sequences
        largest = nll_BT.detach().max() if nll_BT.numel() else torch.zeros(())
        return LossOutput(loss=loss, sums={"nll": nll_BT.detach().sum()}, maxes={"nll": largest})


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Half the squared error of `values` against `returns`, averaged over tokens."""

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share."""
        error_BT = (predictions["values"] - batch["returns"]) * batch["loss_mask"]
        square = 0.5 * error_BT.square().sum()
        return LossOutput(loss=square / scale.num_tokens, sums={"square": square.detach()})


@dataclass(frozen=True, slots=True)
class UnitLoss:
    """Softplus of what the sequences of a unit come to together, a mean over units: of a part of one it is another number."""

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share."""
        _, place_B = batch["unit"].unique(return_inverse=True)
        sum_B = (batch["advantages"] * predictions["logprobs"] * batch["loss_mask"]).sum(1)
        sum_U = sum_B.new_zeros(int(place_B.max()) + 1).index_add(0, place_B, sum_B)
        return LossOutput(loss=torch.nn.functional.softplus(-0.1 * sum_U).sum() / scale.num_units)


@dataclass(frozen=True, slots=True)
class PoisonedLoss:
    """`inner`, but where the token `POISON` is seen the loss is NaN, or finite with a gradient of NaN."""

    inner: LossFn
    gradient_only: bool

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return the share of `inner`, poisoned where it has to be."""
        output = self.inner(predictions, batch, scale)
        if not bool((batch["input_ids"] == POISON).any()):
            return output
        # The square root of zero has an infinite slope, and infinity times zero is no number.
        poison = (output.loss * 0.0).sqrt() if self.gradient_only else output.loss * float("nan")
        return LossOutput(loss=output.loss + poison)

    @property
    def entropy_gradient(self) -> bool:
        """As `inner` has it."""
        return bool(getattr(self.inner, "entropy_gradient", False))
