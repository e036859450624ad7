"""A reward model: the role with a value head that judges whole sequences. It knows the `Engine` interface alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat_engine import TrainBatch, train_batch
from offbeat_trainer.roles.critic import predict_values

if TYPE_CHECKING:
    from offbeat_engine import Engine


class RewardModel:
    """A frozen judge: one number for a whole sequence, read where its last token was read."""

    def __init__(self, engine: Engine) -> None:
        """Take an initialised engine whose model has a value head; its optimizer is never stepped."""
        self._engine = engine

    def scores(self, batch: TrainBatch) -> torch.Tensor:
        """Return the score [B] float32 of every sequence of `batch` (the same on every rank), in its order.

        A collective. The value head answers at t with what it read before t. So that it reads the last token too,
        it is asked for the place after it; what stands there is never looked at.
        """
        lengths_B = batch["lengths"]
        position_T = torch.arange(batch["input_ids"].shape[1] + 1)
        judged = train_batch(
            input_ids=torch.nn.functional.pad(batch["input_ids"], (0, 1)),
            lengths=lengths_B + 1,
            loss_mask=position_T[None] == lengths_B[:, None],
        )
        return predict_values(self._engine, judged).sum(-1)
