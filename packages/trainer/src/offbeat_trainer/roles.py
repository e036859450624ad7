"""Roles on the training engine. They know the `Engine` interface and nothing of what is behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from offbeat_trainer.algorithms.off_policy import derived
from offbeat_trainer.metrics import Last, Max, Mean, Metric, Sum

if TYPE_CHECKING:
    import torch

    from offbeat_engine import Engine, LossFn, StepStats, TrainBatch


class Reference:
    """A frozen policy: gives log-probs, never changes."""

    def __init__(self, engine: Engine, *, base: bool = False) -> None:
        """Take an initialised engine, which is not trained; or the one that trains adapters, for the `base` under them."""
        self._engine = engine
        self._mode = engine.base_mode if base else engine.eval_mode

    def logprobs(self, share: TrainBatch) -> torch.Tensor | None:
        """Return log-probs [B, T] float32 of this rank's share, where that is, zero outside its `loss_mask`. A collective.

        None on a rank that holds no outputs of the model, where no loss is called either.
        """
        return self.logprobs_of([share])[0]

    def logprobs_of(self, shares: list[TrainBatch]) -> list[torch.Tensor | None]:
        """Return `logprobs` of each of `shares`; weights that wait in host memory come for all of them once."""
        with self._mode():
            answers = [self._engine.forward_backward_step(share, forward_only=True)[0] for share in shares]
        return [cast("torch.Tensor | None", answer.get("logprobs", None)) for answer in answers]


class Actor:
    """The policy being trained.

    One `update` is one step of a loop: the batch is cut into `updates_per_step` mini-batches of whole groups'
    neighbours, each of which is one optimizer step. With a single mini-batch the policy that is updated is the
    one that the importance ratio is taken against, so no extra forward pass is made for it; nor is one for several
    when the loss says (`needs_old_logprobs`) that it takes the ratio against the sampler.
    """

    def __init__(
        self,
        engine: Engine,
        loss_fn: LossFn,
        *,
        updates_per_step: int = 1,
        reference: Reference | None = None,
    ) -> None:
        """Take an initialised engine and, if the loss has a KL term, the reference it is taken against."""
        self._engine = engine
        self._loss_fn = loss_fn
        self._updates_per_step = updates_per_step
        self._reference = reference

    def update(self, batch: TrainBatch) -> list[Metric]:
        """Train on `batch`, which is the same on every rank. A collective.

        Returns:
            The step's metrics, equal on all ranks.
        """
        shares = [self._engine.shard_data(mini) for mini in split_evenly(batch, self._updates_per_step)]
        judges = {} if self._reference is None else {"ref_logprobs": self._reference}
        if len(shares) > 1 and getattr(self._loss_fn, "needs_old_logprobs", True):
            judges["old_logprobs"] = Reference(self._engine)
        for key, judge in judges.items():
            for share, logprobs in zip(shares, judge.logprobs_of(shares), strict=True):
                if logprobs is not None:
                    share[key] = logprobs
        self._engine.set_loss_fn(self._loss_fn)
        return train_on(self._engine, shares)

    def supervise(self, batch: TrainBatch, loss_fn: LossFn) -> list[Metric]:
        """Make one optimizer step on a supervised batch. A collective."""
        self._engine.set_loss_fn(loss_fn)
        return train_on(self._engine, [self._engine.shard_data(batch)])


def train_on(engine: Engine, shares: list[TrainBatch]) -> list[Metric]:
    """Make one optimizer step on each of this rank's shares of mini-batches; return their metrics. A collective."""
    with engine.train_mode():  # once for all: weights may wait in host memory outside
        return [metric for share in shares for metric in _step(engine, share)]


def _step(engine: Engine, share: TrainBatch) -> list[Metric]:
    engine.optimizer_zero_grad()
    _, _, ctx = engine.forward_backward_step(share, predict=False)
    grad_norm = engine.optimizer_step()
    lr = engine.lr_scheduler_step()
    assert ctx.stats is not None
    return [
        *stats_metrics(ctx.stats),
        Metric("train/grad_norm", Mean(grad_norm)),
        Metric("train/lr", Last(lr)),
    ]


def stats_metrics(stats: StepStats) -> list[Metric]:
    """Return an engine's `StepStats` as metrics: what the loss summed becomes a mean over optimizer steps."""
    return [
        Metric("train/loss", Mean(stats.loss)),
        Metric("train/micro_batches", Mean(stats.num_micro_batches)),
        Metric("train/tokens", Mean(stats.num_tokens)),
        *(Metric(key, Mean(value)) for key, value in {**stats.sums, **derived(stats.sums)}.items()),
        *(Metric(key, Max(value)) for key, value in stats.maxes.items()),
        *(Metric(f"engine/{key}", Mean(value)) for key, value in stats.engine.items()),
        *_costs(stats),
    ]


def _costs(stats: StepStats) -> list[Metric]:
    """Return what a step took. Rates are weighted by time, so that they are those of all steps together."""
    if not stats.elapsed_s:
        return []
    elapsed_s = stats.elapsed_s
    rates = [] if stats.mfu is None else [Metric("time/mfu_fraction", Mean(stats.mfu * elapsed_s, elapsed_s))]
    return [
        Metric("time/engine_s", Sum(elapsed_s)),
        Metric("time/engine_tokens_per_s", Mean(stats.num_tokens, elapsed_s)),
        *rates,
        Metric("memory/train_peak_bytes", Max(stats.peak_memory_bytes)),
    ]


def split_evenly(batch: TrainBatch, num_parts: int) -> list[TrainBatch]:
    """Cut `batch` into `num_parts` runs of equally many sequences, in order.

    Raises:
        ValueError: the number of sequences is not divisible.
    """
    num_sequences = batch.batch_size[0]
    if num_sequences % num_parts:
        raise ValueError(
            f"{num_sequences} sequences cannot be cut into {num_parts} equal mini-batches; "
            "choose `updates_per_step` so that it divides prompts_per_step * group_size"
        )
    size = num_sequences // num_parts
    return [batch[start : start + size] for start in range(0, num_sequences, size)]
