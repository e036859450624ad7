"""Loss functions that ship with the engine: the simplest real ones. Reinforcement learning brings its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat_engine.values import LossOutput

if TYPE_CHECKING:
    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.values import LossScale, Predictions


@dataclass(frozen=True, slots=True)
class SftLoss:
    """Negative log-likelihood in nats, averaged over all tokens under `loss_mask` (of all ranks).

    `sums["nll"]` and `sums["entropy"]` add up over those tokens: divide them by `StepStats.num_loss_tokens`.
    """

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return the micro-batch's share; positions outside `loss_mask` are zero in `predictions` already."""
        nll = -(predictions["logprobs"] * batch["loss_mask"]).sum()
        sums = {"nll": nll.detach(), "entropy": predictions["entropy"].detach().sum()}
        return LossOutput(loss=nll / scale.num_tokens, sums=sums)
