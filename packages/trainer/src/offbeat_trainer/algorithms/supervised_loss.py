"""The loss of supervised training: the negative log-likelihood of the tokens under the mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat_engine import LossOutput, LossScale
from offbeat_trainer.algorithms.aggregation import inside

if TYPE_CHECKING:
    from offbeat_engine import Predictions, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedLoss:
    """Mean negative log-likelihood per token in nats, as an `offbeat_engine.LossFn`; its exponential is perplexity."""

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return this micro-batch's share of the loss."""
        total = -inside(predictions["logprobs"], batch["loss_mask"]).sum()
        loss = total / max(scale.num_tokens, 1)  # nothing to train on anywhere: zero, not 0 / 0
        return LossOutput(loss=loss, sums={"supervised/nll_nats": loss.detach()})
