"""A critic: the role with a value head that PPO trains. It knows the `Engine` interface alone.

B = sequences, T = tokens of the longest one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat_engine import TrainBatch, train_batch
from offbeat_trainer.metrics import Mean, Metric, reduce_metrics
from offbeat_trainer.roles.role import Role, unrouted

if TYPE_CHECKING:
    from offbeat_engine import Engine, LossFn


_MOMENTS = ("value/error_square", "value/return_mean", "value/return_square")


class Critic:
    """A value function being trained: V(tokens so far) before each token of a completion."""

    def __init__(self, engine: Engine, loss_fn: LossFn, *, updates_per_step: int = 1) -> None:
        """Take an initialised engine whose model has a value head, trained by `loss_fn`, a `ValueLoss`."""
        self._engine = engine
        self._loss_fn = loss_fn
        self._updates_per_step = updates_per_step

    def values(self, batch: TrainBatch) -> torch.Tensor:
        """Return the values [B, T] float32 of `batch` (the same on every rank), in its order, zero outside `loss_mask`.

        `values[b, t]` is the value of the state in which token t is chosen, so it goes with the log-prob of t. A
        collective.
        """
        return predict_values(self._engine, batch)

    def update(self, batch: TrainBatch) -> list[Metric]:
        """Train on `batch`, the same on every rank, with `returns` and the old `values` in it. A collective.

        Returns:
            The step's metrics under `critic/` and `value/`, equal on all ranks.

        Raises:
            ValueError: the batch cannot be cut into `updates_per_step` mini-batches.
        """
        role = Role(self._engine)
        metrics = role.train(role.shares(batch, self._updates_per_step), self._loss_fn)
        means = reduce_metrics([metric for metric in metrics if metric.key in _MOMENTS])
        return [
            *(
                Metric(metric.key.replace("train/", "critic/"), metric.reduction)
                for metric in metrics
                if metric.key not in _MOMENTS
            ),
            Metric("value/explained_variance", Mean(explained_variance(*(means[key] for key in _MOMENTS)))),
        ]


def explained_variance(error_square: float, return_mean: float, return_square: float) -> float:
    """Return 1 - E[(R - v)^2] / Var[R]: 1 is a perfect critic, 0 one that knows only the mean, NaN if R never varies."""
    variance = return_square - return_mean**2
    return 1 - error_square / variance if variance > 0 else float("nan")


def predict_values(engine: Engine, batch: TrainBatch) -> torch.Tensor:
    """Shard, run forward, and gather the values in the order and shape of `batch`."""
    share = engine.shard_data(unrouted(batch))
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(share, forward_only=True)
    return engine.unshard_data(predictions.select("values"))["values"]


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
