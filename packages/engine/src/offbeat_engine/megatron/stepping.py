"""One forward-backward step: megatron-core's schedules over the micro-batches that the toolkit cuts, counts and scores."""

# megatron-core is untyped; torch and tensordict are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

# ruff: noqa: N815 shapes ride in names, of fields too

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from offbeat_engine.batch import units_of
from offbeat_engine.megatron.layers import context, model, transformer_engine
from offbeat_engine.megatron.layers.model import Chunk, predict
from offbeat_engine.toolkit.collectives import gather_ints
from offbeat_engine.toolkit.hf.layouts import KEY, check_experts, fed_lengths, lay_out, place
from offbeat_engine.toolkit.hf.probing import check_lengths
from offbeat_engine.toolkit.step.micro_batches import MicroBatches
from offbeat_engine.toolkit.step.planning import plan_micro_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from offbeat_engine.batch import Predictions, StepContext, TrainBatch
    from offbeat_engine.megatron.config import MegatronConfig
    from offbeat_engine.megatron.families import Shape
    from offbeat_engine.megatron.groups import Groups
    from offbeat_engine.toolkit.hf.layouts import Layout
    from offbeat_engine.toolkit.step.micro_batches import StepRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How this engine answers one call; `request` is the call."""

    request: StepRequest
    config: MegatronConfig
    chunks: Sequence[Chunk]
    shape: Shape
    groups: Groups
    sequence_limit: int | None

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.request.loss_fn is not None


@dataclass(frozen=True, slots=True)
class _Row:
    """A `MakeInputs` of one row of all fed tokens; each sequence filled up to the longest one where they are not `packed`.

    `num_sharing` ranks share each, which is filled up for that, too.
    """

    packed: bool
    num_sharing: int
    experts_bTK: torch.Tensor | None

    def __call__(
        self, ids_bT: torch.Tensor, fed_bT: torch.Tensor, device: torch.device
    ) -> tuple[dict[str, object], torch.Tensor]:
        lengths_b = fed_bT.sum(1)
        if not self.packed:
            lengths_b = lengths_b.max().expand_as(lengths_b)
        lengths_b = context.filled_up(lengths_b, self.num_sharing)
        more = max(0, int(lengths_b.max()) - ids_bT.shape[1])
        shape_bT, ids_bT = ids_bT.shape, functional.pad(ids_bT, (0, more))
        fed_bT = torch.arange(ids_bT.shape[1], device=ids_bT.device) < lengths_b[:, None]
        row_S, position_S = fed_bT.nonzero(as_tuple=True)
        where_bT = torch.zeros_like(ids_bT)
        where_bT[row_S, position_S] = torch.arange(len(row_S), device=ids_bT.device)
        inputs: dict[str, object] = {
            "ids_S": ids_bT[row_S, position_S],
            "positions_S": position_S,
            "lengths": lengths_b[lengths_b > 0].cpu(),
        }
        if self.experts_bTK is not None and self.experts_bTK.shape[:2] == shape_bT:  # a dummy has none
            experts_bTK = functional.pad(self.experts_bTK, (0, 0, 0, more), value=-1)
            inputs["experts_SK"] = experts_bTK[row_S, position_S]
        return inputs, where_bT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fed:
    """What the model takes of one micro-batch, with its layout: a row of S tokens, those that fill it up in sequences of their own.

    Where ranks share sequences, these are this rank's tokens of the row, and `lengths_N` still those of whole sequences.
    `experts_SLK` are the experts that are replayed for this rank's tokens of the row.
    """

    ids_1S: torch.Tensor
    positions_S: torch.Tensor
    lengths_N: torch.Tensor
    experts_SLK: torch.Tensor | None
    layout: Layout


def run_step(step: Step, batch: TrainBatch, ctx: StepContext) -> Predictions:
    """Run every micro-batch of `batch`, fill `ctx`, and return detached predictions in the batch's order."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    run = MicroBatches(step.request, batch, ctx, partial(_plan, step))
    if not run.num_micro:
        return run.finish()
    num_micro = _rounded(run.num_micro, step.config)
    layouts = [_lay_out(step, run.rows(number)) for number in range(num_micro)]
    num_tokens = _row_length(step, layouts)
    fed = [_feed(step, layout, num_tokens or _of_row(step, layout)) for layout in layouts]
    for chunk in step.chunks:
        model.forget(chunk.model)
    forward_backward = get_forward_backward_func()
    numbers: list[Iterator[int]] = [iter(range(num_micro)) for _ in step.chunks]
    forward_backward(
        forward_step_func=partial(_forward, step, run, fed),
        data_iterator=numbers if len(numbers) > 1 else numbers[0],
        model=[chunk.wrapped for chunk in step.chunks],
        num_microbatches=num_micro,
        seq_length=num_tokens or 1,
        micro_batch_size=1,
        forward_only=not step.trains,
    )
    return run.finish()


def _lay_out(step: Step, micro: TrainBatch | None) -> Layout:
    experts = micro[KEY] if micro is not None and KEY in micro else None
    sharing = step.groups.context
    row = _Row(step.config.packing, sharing.size, experts)
    cut = partial(context.cut, sharing=sharing) if sharing.size > 1 else None
    return lay_out(micro, row, step.request.device, cut)


def _plan(step: Step, batch: TrainBatch) -> list[list[int]]:
    check_lengths(batch, step.sequence_limit)
    shape = step.shape
    check_experts(batch, shape.num_layers, shape.num_experts, shape.experts_per_token)
    filled = context.filled_up(fed_lengths(batch["loss_mask"]), step.groups.context.size)
    lengths = [int(length) for length in filled.tolist()]
    return plan_micro_batches(
        lengths,
        max_tokens=step.config.row_tokens,
        padded=not step.config.packing,
        units=units_of(batch),
    )


def _rounded(num_micro: int, config: MegatronConfig) -> int:
    """Return as many micro-batches as the schedule takes: interleaved, a multiple of its stages. Those beyond are dummies."""
    stages = config.pipeline_parallel_size if config.virtual_pipeline_size > 1 else 1
    return -(-num_micro // stages) * stages


def _of_row(step: Step, layout: Layout) -> int:
    """Return how long the row of a micro-batch is, filled up so that ranks of a tensor, too, can share it, and multiply it."""
    share = step.config.tensor_parallel_size if step.config.sequence_parallel else 1
    share *= transformer_engine.multiple_of(step.config)
    share *= context.filled_up(1, step.groups.context.size)
    return -(-len(_tensor(layout, "ids_S")) // share) * share


def _row_length(step: Step, layouts: Sequence[Layout]) -> int:
    """Return the one length of all rows where stages, or ranks that share experts, must know it beforehand; else 0."""
    longest = max(_of_row(step, layout) for layout in layouts)
    if step.config.expert_parallel_size > 1:
        return max(length for (length,) in gather_ints(step.request.world, longest))
    return longest if step.config.pipeline_parallel_size > 1 else 0


def _tensor(layout: Layout, name: str) -> torch.Tensor:
    value = layout.model_inputs[name]
    assert isinstance(value, torch.Tensor)
    return value


def _feed(step: Step, layout: Layout, num_tokens: int) -> _Fed:
    device = step.request.device
    ids_S, positions_S = _tensor(layout, "ids_S"), _tensor(layout, "positions_S")
    missing = num_tokens - len(ids_S)
    lengths_N = _tensor(layout, "lengths")
    if missing:
        longest = int(
            lengths_N.max()
        )  # attention over one sequence of them all would cost more than the real ones
        more_N = torch.full((-(-missing // longest),), longest, dtype=lengths_N.dtype)
        more_N[-1] -= more_N.sum() - missing
        lengths_N = torch.cat((lengths_N, more_N))
        more_S = torch.arange(missing, device=ids_S.device)
        # Various tokens, or one expert would get them all.
        ids_S = torch.cat((ids_S, more_S % step.shape.vocab))
        positions_S = torch.cat((positions_S, more_S % longest))
    sharing, mine_S = step.groups.context, slice(None)
    if sharing.size > 1:
        mine_S = context.dealt(tuple(map(int, lengths_N.tolist())), sharing.size)[sharing.rank].to(
            ids_S.device
        )
        ids_S, positions_S = ids_S[mine_S], positions_S[mine_S]
    return _Fed(
        ids_1S=ids_S[None].to(device, non_blocking=True),
        positions_S=positions_S.to(device, non_blocking=True),
        lengths_N=lengths_N,
        experts_SLK=_experts(step, layout, missing, mine_S),
        layout=layout,
    )


def _experts(step: Step, layout: Layout, missing: int, mine_S: slice | torch.Tensor) -> torch.Tensor | None:
    """Return what is replayed of `mine_S`, as far as this rank has them between the matrices; `missing` fill the row up."""
    if "experts_SK" not in layout.model_inputs:
        return None
    experts_SK = _tensor(layout, "experts_SK")
    experts_SK = functional.pad(experts_SK, (0, 0, 0, missing), value=-1)[mine_S]
    if step.config.sequence_parallel:
        tensor = step.groups.tensor
        experts_SK = experts_SK.chunk(tensor.size)[tensor.rank]
    return experts_SK.unflatten(1, (step.shape.num_layers, -1)).to(step.request.device, non_blocking=True)


def _forward(
    step: Step,
    run: MicroBatches,
    fed: Sequence[_Fed],
    numbers: Iterator[int],
    wrapped: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch through one chunk: what megatron-core's schedules call."""
    number = next(numbers)
    one = fed[number]
    chunk = next(chunk.model for chunk in step.chunks if chunk.wrapped is wrapped)
    chunk.rotary_pos_emb.positions_S = one.positions_S
    again = step.trains and step.config.activation_checkpointing and step.config.recompute == "layers"
    model.hand_over(chunk, one.experts_SLK, again)
    run.on_device(number)
    states = wrapped(one.ids_1S, one.positions_S[None], one.lengths_N)
    return states, partial(_end, step, run, number, one.layout, chunk)


def _end(
    step: Step,
    run: MicroBatches,
    number: int,
    layout: Layout,
    chunk: Any,  # noqa: ANN401
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a micro-batch on the last stage, in the form that is divided by nothing."""
    wants_entropy_gradient = bool(getattr(step.request.loss_fn, "entropy_gradient", False))
    outputs = predict(chunk, states, layout, step.shape, step.groups, wants_entropy_gradient)
    if layout.counts_P:
        outputs = context.gather_answers(outputs, layout)
    micro = run.rows(number)
    predictions: dict[str, torch.Tensor] = {}
    if micro is not None:
        placed = [place(output_M, layout, micro["input_ids"].shape) for output_M in outputs]
        predictions = dict(zip(step.request.names, placed, strict=True))
    if step.trains:
        loss = run.loss(number, predictions, outputs[0])
    else:
        run.take(number, predictions)
        loss = outputs[0].sum() * 0.0
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}
