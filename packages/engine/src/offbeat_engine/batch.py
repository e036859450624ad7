"""`TrainBatch`: what a training engine is given, with its schema in writing.

B = sequences, T = tokens of the longest one, K = whatever a key has several of per token. Sequences are right-padded: prompt, then completion, then padding.
Everything of shape [B, T] is aligned to the token it speaks of: `logprobs[b, t]` is the log-probability of
`input_ids[b, t]` given the tokens before it, so position 0 never has one.

What goes into an engine and comes out of it, besides batches: losses, contexts, statistics, specs of weights.

Loss functions that ship with the engine: the simplest real ones. Reinforcement learning brings its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

import torch
from tensordict import TensorDict

from offbeat_engine.errors import BatchError

TrainBatch = TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of the schema, with its shape as a word: [B], [B, T], or [B, T, K] of any K."""

    key: str
    dims: Literal["B", "BT", "BTK"]
    dtype: torch.dtype = torch.float32
    required: bool = False
    meaning: str


SCHEMA: tuple[Field, ...] = (
    Field(key="input_ids", dims="BT", dtype=torch.int64, required=True, meaning="prompt, completion, padding"),
    Field(key="lengths", dims="B", dtype=torch.int64, required=True, meaning="real tokens of each sequence"),
    Field(
        key="loss_mask", dims="BT", dtype=torch.bool, required=True,
        meaning="True at tokens whose log-probability is trained or asked for; never at position 0 or in padding",
    ),
    Field(
        key="temperature", dims="B", dtype=torch.float32, required=False,
        meaning="logits are divided by it before log-probabilities are taken; absent means 1",
    ),
    Field(key="advantages", dims="BT", dtype=torch.float32, required=False, meaning="advantage of each token"),
    Field(
        key="rollout_logprobs", dims="BT", dtype=torch.float32, required=False,
        meaning="log-probabilities as the sampler saw them",
    ),
    Field(
        key="old_logprobs", dims="BT", dtype=torch.float32, required=False,
        meaning="log-probabilities under the policy that the importance ratio is taken against",
    ),
    Field(
        key="ref_logprobs", dims="BT", dtype=torch.float32, required=False,
        meaning="log-probabilities under the reference policy",
    ),
    Field(key="values", dims="BT", dtype=torch.float32, required=False, meaning="value estimates before the update"),
    Field(key="returns", dims="BT", dtype=torch.float32, required=False, meaning="targets of the value head"),
    Field(
        key="policy_version", dims="BT", dtype=torch.int64, required=False,
        meaning="version of the weights that sampled each token; -1 where none did (prompt, padding)",
    ),
    Field(
        key="routed_experts", dims="BTK", dtype=torch.int16, required=False,
        meaning="experts that the sampler's routers gave each token, layer after layer, as many in each as a token has; -1 where "
        "none were recorded (padding, a completion's last token)",
    ),
    Field(
        key="top_ids", dims="BTK", dtype=torch.int64, required=False,
        meaning="tokens whose log-probabilities are asked for in place of each token (`Feature.TOP_TOKENS`)",
    ),
    Field(key="group", dims="B", dtype=torch.int64, required=False, meaning="index of the prompt's group"),
    Field(
        key="unit", dims="B", dtype=torch.int64, required=False,
        meaning="sequences of one number are never parted: one rank and one micro-batch has all of them (a pair of DPO)",
    ),
)  # fmt: skip


_registered: dict[str, Field] = {}


def register_field(field: Field) -> Field:
    """Add a key of an engine's or algorithm's own to what a batch may hold, in this process; returns it.

    Call it where the module that needs the key is imported: then it is known wherever that is, on the ranks too. It is cut,
    shared, checked and moved as the keys of `SCHEMA` are. Put a prefix of your own in front ("router/experts").

    Raises:
        BatchError: the key is in `SCHEMA`, or was registered with another shape, dtype or meaning.
    """
    known = next((entry for entry in schema() if entry.key == field.key), None)
    if known is not None and known != field:
        raise BatchError(
            f"the key `{field.key}` of a batch is taken: {known.dims} {known.dtype} ({known.meaning}); choose another name"
        )
    if known is None:
        _registered[field.key] = field
    return field


def schema() -> tuple[Field, ...]:
    """Return every key that a batch may hold in this process: `SCHEMA`, then what was registered."""
    return (*SCHEMA, *_registered.values())


def train_batch(**tensors: torch.Tensor) -> TrainBatch:
    """Build a `TrainBatch` from tensors named as in `schema()` and check it.

    Raises:
        BatchError: a key is missing or unknown, or a shape or dtype is not the schema's.
    """
    if "input_ids" not in tensors:
        raise BatchError("a batch needs `input_ids` [B, T] int64; got " + (", ".join(tensors) or "nothing"))
    batch = TensorDict(dict(tensors), batch_size=[tensors["input_ids"].shape[0]])
    check_batch(batch)
    return batch


def check_batch(batch: TrainBatch) -> None:
    """Raise `BatchError` naming the first key of `batch` that breaks the schema, else return."""
    check_keys(batch)
    by_key = {field.key: field for field in schema()}
    batch_size, num_tokens = batch["input_ids"].shape
    for key in map(str, batch.keys()):  # a TensorDict iterates over its batch, not its keys
        field = by_key.get(key)
        if field is None:
            raise BatchError(
                f"unknown key `{key}` in a batch; the schema has {', '.join(by_key)} (`register_field` adds one of your own)"
            )
        shape = (batch_size,) if field.dims == "B" else (batch_size, num_tokens)
        tensor = batch[key]
        dims = len(field.dims)
        if tensor.ndim != dims or tuple(tensor.shape[:2]) != shape or tensor.dtype != field.dtype:
            wanted = [*map(str, shape), "K"][:dims]
            raise BatchError(
                f"`{key}` must be [{', '.join(wanted)}] {field.dtype} ({field.meaning}), "
                f"got {list(tensor.shape)} {tensor.dtype}"
            )
    _check_values(batch, num_tokens)


def select_rows(batch: TrainBatch, rows: list[int]) -> TrainBatch:
    """Return the sequences numbered `rows`, in that order, cut to the longest of them."""
    rows_b = torch.tensor(rows, dtype=torch.int64, device=batch["lengths"].device)
    longest = int(batch["lengths"][rows_b].max()) if rows else 0
    per_token = {field.key for field in schema() if field.dims != "B"}
    tensors: dict[str, torch.Tensor] = {}
    for key in map(str, batch.keys()):
        tensor = batch[key].index_select(0, rows_b)
        tensors[key] = tensor[:, :longest] if key in per_token else tensor
    return TensorDict(tensors, batch_size=[len(rows)])  # pyright: ignore[reportArgumentType]


def units_of(batch: TrainBatch) -> list[int] | None:
    """Return the unit of each sequence, for plans; None where each may stand alone."""
    return [int(unit) for unit in batch["unit"].tolist()] if "unit" in batch else None


def fingerprint(batch: TrainBatch) -> int:
    """Return a number that differs, all but surely, between batches of other tokens, lengths or masks."""
    ids_BT = batch["input_ids"] * 2 + batch["loss_mask"]
    weight_BT = torch.arange(1, ids_BT.numel() + 1, device=ids_BT.device).view(ids_BT.shape)
    return int((ids_BT * weight_BT).sum() + batch["lengths"].sum())


def check_keys(batch: TrainBatch) -> None:
    """Raise `BatchError` naming the first required key that `batch` has not, else return."""
    for entry in SCHEMA:  # what is registered is never required: batches are made before anybody asks for it
        if entry.required and entry.key not in batch:
            dims = ", ".join(entry.dims)
            raise BatchError(
                f"a batch needs `{entry.key}` [{dims}] {entry.dtype} ({entry.meaning}), got "
                f"{', '.join(sorted(map(str, batch.keys()))) or 'nothing'}; make batches with `train_batch`"
            )


def check_replay(batch: TrainBatch, replays: bool) -> None:
    """Raise `BatchError` where experts come for an engine that does not replay them (`Feature.ROUTED_EXPERTS`)."""
    if "routed_experts" in batch and not replays:
        raise BatchError(
            "this engine's routers choose experts themselves, and the batch brings `routed_experts`; leave the key out, or take "
            "an engine that declares `routed_experts`"
        )


def check_top_tokens(batch: TrainBatch, top_k: int, names: bool) -> None:
    """Raise `BatchError` where log-probs of other tokens are asked of an engine that has none (`Feature.TOP_TOKENS`)."""
    if ("top_ids" in batch or top_k) and not names:
        raise BatchError(
            "`top_ids` or `StepContext.top_k` ask for log-probabilities of other tokens than those of the batch; take an engine that "
            "declares `top_tokens`"
        )


def check_tokens(batch: TrainBatch, vocab_size: int | None) -> None:
    """Raise `BatchError` where a token, but for padding, is none of a model of `vocab_size`; None: that is not known."""
    if vocab_size is None:
        return
    ids_BT = batch["input_ids"]
    real_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device) < batch["lengths"][:, None]
    odd_M = ids_BT[real_BT & ((ids_BT < 0) | (ids_BT >= vocab_size))]
    if odd_M.numel():
        raise BatchError(
            f"`input_ids` hold {odd_M.numel()} tokens that the model has not, such as {int(odd_M[0])}: it has 0..{vocab_size - 1}; "
            "is the tokenizer of another model?"
        )


def _check_values(batch: TrainBatch, num_tokens: int) -> None:
    lengths_B = batch["lengths"]
    if lengths_B.numel() and (int(lengths_B.min()) < 1 or int(lengths_B.max()) > num_tokens):
        raise BatchError(f"`lengths` must lie in 1..{num_tokens}, got {lengths_B.tolist()}")
    position_T = torch.arange(num_tokens, device=lengths_B.device)
    outside_BT = (position_T[None] >= lengths_B[:, None]) | (position_T[None] == 0)
    if bool((batch["loss_mask"] & outside_BT).any()):
        raise BatchError(
            "`loss_mask` is set at position 0 or in the padding; no log-probability exists there"
        )
    if "temperature" in batch and not bool((batch["temperature"] > 0).all()):
        raise BatchError(
            f"`temperature` must be more than 0, logits are divided by it; got {batch['temperature'].tolist()}"
        )


Predictions = TensorDict
"""What the model said, shape [B, T] float32 each, aligned like `TrainBatch`, zero outside `loss_mask`:
`logprobs` and `entropy` (nats) from a language-model head, `values` from a value head. Where the batch has `top_ids`, `top_logprobs`
[B, T, K] of these tokens; where `StepContext.top_k` asks for the likeliest ones, `top_logprobs` and `top_ids` int64 [B, T, K]."""


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
    and the engine counts `loss_mask` over all ranks once, as `preprocess_fn` leaves it. `user` belongs to the hooks. `top_k` more
    than 0 asks which tokens are likeliest in each place, see `Predictions`; `top_ids` of the batch count for nothing then.
    """

    scale: LossScale | None = None
    stats: StepStats | None = None
    user: dict[str, object] = field(default_factory=dict[str, object])
    top_k: int = 0


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
