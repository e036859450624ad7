"""What goes into an engine and comes out of it, besides batches: losses, contexts, statistics, specs of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch
from tensordict import TensorDict

from offbeat_engine.batch import TrainBatch

Predictions = TensorDict
"""What the model said, shape [B, T] float32 each, aligned like `TrainBatch`, zero outside `loss_mask`:
`logprobs` and `entropy` (nats) from a language-model head, `values` from a value head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Global counts of one optimizer step, over all ranks and micro-batches, computed once.

    A loss sums over what it sees and divides by these, so that micro-batch size, packing and the number of
    ranks change nothing but speed. `num_units` counts the units of a batch that has the key `unit`, else its sequences; 0 is for
    losses that do not ask.
    """

    num_tokens: int
    num_sequences: int
    num_units: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a loss function returns for one micro-batch.

    `loss` is a scalar already divided by a global count. `sums` are detached scalars that add up over
    micro-batches and ranks (divide them by a global count to get means); `maxes` are combined by maximum.
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    maxes: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


class LossFn(Protocol):
    """A differentiable function of one micro-batch. Must be picklable: it travels to the ranks.

    It may carry a bool attribute (or property) `entropy_gradient`: true asks for a gradient of
    `predictions["entropy"]`. Without it, or where it is false, an engine may hand out entropy as a number to look at
    (`Fsdp2Engine` does), since the gradient costs memory and time that most losses do not need. The attribute is
    optional, so no member of this protocol: engines read it with `getattr(loss_fn, "entropy_gradient", False)`.
    """

    def __call__(self, predictions: Predictions, batch: TrainBatch, scale: LossScale) -> LossOutput:
        """Return the micro-batch's share of the loss; `predictions` carry gradients, `batch` does not.

        It is called on every rank that holds the micro-batch's outputs; both are where the model computes. What it raises
        is raised on all ranks, as `StepError`.
        """
        ...


@dataclass(slots=True, kw_only=True)
class StepContext:
    """Travels through one call of `forward_backward_step` and comes back filled; the next call takes a new one.

    Pass a `scale` to fix the global counts over several calls (gradient accumulation by hand); leave it None
    and the engine counts `loss_mask` over all ranks once, as `preprocess_fn` leaves it. `user` belongs to the hooks.
    """

    scale: LossScale | None = None
    stats: StepStats | None = None
    user: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one `forward_backward_step` did, the same on every rank.

    `loss`, `sums` and `maxes` are reduced over all ranks. `num_tokens` counts the real tokens of the batch over
    all ranks, `num_loss_tokens` those under the mask, `num_micro_batches` the largest count of any rank. `elapsed_s` and
    `peak_memory_bytes` are the largest of any rank (on a CPU the memory is the process's so far). `mfu` is the share of
    the devices' arithmetic that the model needed (arXiv 2204.02311, appendix B); None where the device's peak is not known.
    `engine` has what an engine tells of its own, by names of its own.
    """

    loss: float
    sums: dict[str, float]
    maxes: dict[str, float]
    num_tokens: int
    num_loss_tokens: int
    num_micro_batches: int
    elapsed_s: float = 0.0
    mfu: float | None = None
    peak_memory_bytes: int = 0
    engine: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def tokens_per_s(self) -> float:
        """Real tokens of all ranks per second; 0 where no time was taken."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s else 0.0


class WeightKind(StrEnum):
    """What an exported weight is: one of the whole model, or one of an adapter to be laid over a base."""

    FULL = "full"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """One exported weight, under its Hugging Face name, as `named_weights` will yield it.

    An `ADAPTER` weight has the name that peft's `adapter_model.safetensors` gives it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: WeightKind = WeightKind.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShard:
    """A piece of an exported weight: `tensor` begins at `offsets` of the whole, which has `shape`; compute dtype."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor


PreprocessFn = Callable[[TrainBatch, StepContext], TrainBatch]
"""Called once per micro-batch on every rank that holds its inputs; returns the micro-batch to use, the same rows and
tokens. It may change the mask and add keys of the schema (`register_field`). All micro-batches of a call go through it,
on the batch's device, before the first forward pass: `StepContext.scale` counts what it leaves under the mask. Ranks that
share sequences each call it, and it must answer them alike."""

PostprocessFn = Callable[[Predictions, TrainBatch, StepContext], Predictions]
"""Called once per micro-batch on every rank that holds its outputs, after the forward pass and before the loss; predictions
and micro-batch are where the model computes. Returns the predictions to use, [b], [b, T] or [b, T, K] each. Keys that
it adds come back with the others, zero for sequences of which it said nothing."""
