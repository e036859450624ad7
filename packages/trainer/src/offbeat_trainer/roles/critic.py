"""A critic: the role with a value head that PPO trains. It knows the `Engine` interface alone.

B = sequences, T = tokens of the longest one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_trainer.metrics import Mean, Metric, reduce_metrics
from offbeat_trainer.roles.role import Role, unrouted

if TYPE_CHECKING:
    import torch

    from offbeat_engine import Engine, LossFn, TrainBatch

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
