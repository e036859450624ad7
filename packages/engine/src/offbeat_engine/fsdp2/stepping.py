"""One forward-backward step: count globally, plan micro-batches, run them, put the answers back in order."""

# torch and tensordict are typed in part: `tolist` and keyed access answer with unknown types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from offbeat_engine.batch import SCHEMA, check_batch
from offbeat_engine.errors import BatchError, EngineError
from offbeat_engine.fsdp2.packing import fed_lengths, lay_out, shared_inputs, slice_layout
from offbeat_engine.fsdp2.ulysses import gather_answers
from offbeat_engine.interface import LossScale, StepContext, StepStats
from offbeat_engine.toolkit.collectives import compute_device, first_failure, gather, gather_ints
from offbeat_engine.toolkit.planning import plan_micro_batches

if TYPE_CHECKING:
    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.fsdp2.activations import HostActivations
    from offbeat_engine.fsdp2.packing import Layout, MakeInputs
    from offbeat_engine.fsdp2.scorer import Scorer
    from offbeat_engine.interface import LossFn, PostprocessFn, Predictions, PreprocessFn
    from offbeat_engine.world import SubGroup, World

_PER_TOKEN = frozenset(entry.key for entry in SCHEMA if entry.dims == "BT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one call needs besides its batch; `loss_fn` is None when there is only a forward pass.

    `peers` are the consecutive ranks that share the tokens of the same sequences, None where each has its own.
    """

    scorer: Scorer
    world: World
    peers: SubGroup | None
    make_inputs: MakeInputs
    max_tokens: int
    padded: bool
    sharded: bool
    gather_once: bool
    activations: HostActivations | None
    loss_fn: LossFn | None
    preprocess_fn: PreprocessFn | None
    postprocess_fn: PostprocessFn | None

    @property
    def num_peers(self) -> int:
        """Return how many ranks share each sequence."""
        return 1 if self.peers is None else self.peers.size


@dataclass(slots=True)
class _Totals:
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict[str, float])
    maxes: dict[str, float] = field(default_factory=dict[str, float])


def run_step(step: Step, batch: TrainBatch, ctx: StepContext) -> Predictions:
    """Run every micro-batch of `batch`, fill `ctx`, and return detached predictions in the batch's order."""
    plan = _checked_plan(step, batch)
    num_micro, num_tokens, num_loss_tokens = _count(step, batch, len(plan), ctx)
    device = compute_device(step.world)
    names = ("values",) if step.scorer.head == "value" else ("logprobs", "entropy")
    answers = {name: torch.zeros(batch["input_ids"].shape, device=device) for name in names}
    totals = _Totals()
    for number in range(num_micro):
        indices = plan[number] if number < len(plan) else []
        _sync_gradients(step, last=number == num_micro - 1)
        predictions = _run_micro(step, batch, indices, ctx, totals)
        for name in predictions.keys():  # noqa: SIM118 a TensorDict iterates over its batch, not its keys
            _collect(answers, str(name), indices, predictions[name].detach())
    totals = _reduce(step, totals)
    ctx.stats = StepStats(
        loss=totals.loss,
        sums=totals.sums,
        maxes=totals.maxes,
        num_tokens=num_tokens,
        num_loss_tokens=num_loss_tokens,
        num_micro_batches=num_micro,
    )
    return TensorDict(answers, batch_size=batch.batch_size, device=device)  # pyright: ignore[reportArgumentType]


def _checked_plan(step: Step, batch: TrainBatch) -> list[list[int]]:
    """Check the batch on all ranks, so that a bad one on any rank is raised on every rank."""
    error: EngineError | None = None
    try:
        check_batch(batch)
        _check_lengths(batch, step.scorer.sequence_limit)
    except EngineError as caught:
        error = caught
    failure = first_failure(step.world, error)
    if failure is not None:
        raise BatchError(failure.replace("BatchError: ", "", 1)) from error
    lengths = [int(length) for length in fed_lengths(batch["loss_mask"]).tolist()]
    together = step.make_inputs is shared_inputs and "group" in batch
    groups = [int(group) for group in batch["group"].tolist()] if together else None
    return plan_micro_batches(lengths, max_tokens=step.max_tokens, padded=step.padded, groups=groups)


def _check_lengths(batch: TrainBatch, limit: int | None) -> None:
    longest = int(batch["lengths"].max()) if len(batch["lengths"]) else 0
    if limit is not None and longest > limit:
        raise BatchError(
            f"a sequence has {longest} tokens, and beyond {limit} this model changes its rotary frequencies with the "
            "longest sequence of a micro-batch; give shorter ones, or use a rope whose frequencies are fixed"
        )


def _count(step: Step, batch: TrainBatch, num_micro: int, ctx: StepContext) -> tuple[int, int, int]:
    """Fill `ctx.scale` if it is open; return micro-batches per rank, tokens and loss tokens over all ranks."""
    mine = (num_micro, len(batch["lengths"]), int(batch["lengths"].sum()), int(batch["loss_mask"].sum()))
    counts = gather_ints(step.world, *mine, 0 if step.peers is None else _fingerprint(batch))
    for rank, count in enumerate(counts):
        first = rank - rank % step.num_peers
        if count != counts[first]:
            raise BatchError(
                f"ranks {first} and {rank} share the tokens of their sequences, but were given different batches; "
                "give each rank what `shard_data` returns there"
            )
    # Peers hold the same sequences, which count once.
    columns = zip(*counts[:: step.num_peers], strict=True)
    _, num_sequences, num_tokens, num_loss_tokens, _ = (sum(column) for column in columns)
    if ctx.scale is None:
        # At least 1: with nothing under any mask there is nothing to divide either.
        ctx.scale = LossScale(num_tokens=max(1, num_loss_tokens), num_sequences=max(1, num_sequences))
    return max(count[0] for count in counts), num_tokens, num_loss_tokens


def _fingerprint(batch: TrainBatch) -> int:
    """Return a number that differs, all but surely, between batches of other tokens, lengths or masks."""
    ids_BT = batch["input_ids"] * 2 + batch["loss_mask"]
    weight_BT = torch.arange(1, ids_BT.numel() + 1, device=ids_BT.device).view(ids_BT.shape)
    return int((ids_BT * weight_BT).sum() + batch["lengths"].sum())


def _sync_gradients(step: Step, last: bool) -> None:
    """Reduce gradients and let go of gathered weights after the last micro-batch only, where memory allows.

    Where it does not, gradients are scattered after each, but added up over the copies (if any) after the last.
    """
    if not step.sharded or step.loss_fn is None:
        return
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(step.scorer, FSDPModule)
    step.scorer.set_requires_all_reduce(last)
    if step.gather_once:
        step.scorer.set_requires_gradient_sync(last)
        step.scorer.set_reshard_after_backward(last)
        step.scorer.set_is_last_backward(last)


def _run_micro(
    step: Step, batch: TrainBatch, indices: list[int], ctx: StepContext, totals: _Totals
) -> Predictions:
    micro = _take(batch, indices)
    if indices and step.preprocess_fn is not None:
        micro = step.preprocess_fn(micro, ctx)
        check_batch(micro)
    layout = lay_out(micro if indices else None, step.make_inputs, compute_device(step.world))
    if step.peers is not None:
        layout = slice_layout(layout, step.peers)
    wants_entropy_gradient = bool(getattr(step.loss_fn, "entropy_gradient", False))
    with nullcontext() if step.activations is None else step.activations.kept():
        outputs: tuple[torch.Tensor, ...] = step.scorer(layout, wants_entropy_gradient)
    if step.peers is not None:
        # A loss may look at whole sequences: every peer gets all answers.
        outputs = gather_answers(outputs, layout.counts_P, step.peers)
    predictions = _predictions(step, micro, layout, outputs)
    if indices and step.postprocess_fn is not None:
        predictions = step.postprocess_fn(predictions, micro, ctx)
    if step.loss_fn is not None:
        _backward(step, micro, predictions, ctx, totals, anchor=outputs[0])
    return predictions


def _backward(
    step: Step,
    micro: TrainBatch,
    predictions: Predictions,
    ctx: StepContext,
    totals: _Totals,
    anchor: torch.Tensor,
) -> None:
    assert step.loss_fn is not None
    assert ctx.scale is not None
    # An empty micro-batch, or a loss that depends on nothing, still runs backward: other ranks wait for us there.
    loss = anchor.sum() * 0.0
    if len(micro["lengths"]):
        output = step.loss_fn(predictions, micro.to(anchor.device), ctx.scale)
        loss = output.loss if output.loss.requires_grad else loss + output.loss
        totals.loss += float(output.loss.detach())
        for key, value in output.sums.items():
            totals.sums[key] = totals.sums.get(key, 0.0) + float(value)
        for key, value in output.maxes.items():
            totals.maxes[key] = _larger(totals.maxes.get(key, -math.inf), float(value))
    # FSDP averages gradients over ranks; a loss that is one share of a global sum wants them added. Peers compute
    # the same share, and the gather adds theirs up: it counts once.
    (loss * (step.world.size / step.num_peers) if step.sharded else loss).backward()


def _predictions(
    step: Step, micro: TrainBatch, layout: Layout, outputs: tuple[torch.Tensor, ...]
) -> Predictions:
    names = ("values",) if step.scorer.head == "value" else ("logprobs", "entropy")
    shape = micro["input_ids"].shape
    tensors: dict[str, torch.Tensor] = {}
    for name, output_M in zip(names, outputs, strict=True):
        flat = torch.zeros(shape.numel(), device=output_M.device)
        tensors[name] = (flat if layout.dummy else flat.index_put((layout.place_M,), output_M)).view(shape)
    return TensorDict(tensors, batch_size=[shape[0]])  # pyright: ignore[reportArgumentType]


def _take(batch: TrainBatch, indices: list[int]) -> TrainBatch:
    """Return the sequences at `indices`, cut to the longest of them."""
    rows = torch.tensor(indices, dtype=torch.int64, device=batch["lengths"].device)
    longest = int(batch["lengths"][rows].max()) if indices else 0
    tensors: dict[str, torch.Tensor] = {}
    for key in map(str, batch.keys()):  # a TensorDict iterates over its batch, not its keys
        tensor = batch[key].index_select(0, rows)
        tensors[key] = tensor[:, :longest] if key in _PER_TOKEN else tensor
    return TensorDict(tensors, batch_size=[len(indices)])  # pyright: ignore[reportArgumentType]


def _collect(answers: dict[str, torch.Tensor], name: str, indices: list[int], part: torch.Tensor) -> None:
    if not indices:
        return
    if name not in answers:  # added by a postprocess hook
        some = next(iter(answers.values()))
        answers[name] = torch.zeros(some.shape, dtype=part.dtype, device=part.device)
    rows = torch.tensor(indices, device=part.device)
    answers[name][rows, : part.shape[1]] = part


def _reduce(step: Step, mine: _Totals) -> _Totals:
    """Combine over ranks in rank order, so that every rank adds the same numbers in the same order."""
    total = _Totals()
    # Peers computed the same loss: the first of them speaks for all.
    for part in gather(step.world, (mine.loss, mine.sums, mine.maxes))[:: step.num_peers]:
        total.loss += part[0]
        for key, value in part[1].items():
            total.sums[key] = total.sums.get(key, 0.0) + value
        for key, value in part[2].items():
            total.maxes[key] = _larger(total.maxes.get(key, -math.inf), value)
    return total


def _larger(left: float, right: float) -> float:
    """Maximum that lets NaN through, in either order."""
    return left if math.isnan(left) else right if math.isnan(right) else max(left, right)
