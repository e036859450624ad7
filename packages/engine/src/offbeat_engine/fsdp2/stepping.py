"""One forward-backward step: the model on every micro-batch, between what the toolkit does before, beside and after."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offbeat_engine.batch import units_of
from offbeat_engine.config import Dtype
from offbeat_engine.fsdp2.attention.packing import RowInputs, lay_out
from offbeat_engine.fsdp2.attention.varlen import inputs_maker
from offbeat_engine.fsdp2.memory.offload import HostActivations
from offbeat_engine.toolkit.collectives import compute_dtype, gather_answers
from offbeat_engine.toolkit.hf.layouts import fed_lengths, place
from offbeat_engine.toolkit.hf.probing import check_lengths
from offbeat_engine.toolkit.step.micro_batches import MicroBatches
from offbeat_engine.toolkit.step.planning import plan_micro_batches
from offbeat_engine.toolkit.step.throughput import peak_flops

if TYPE_CHECKING:
    import torch

    from offbeat_engine.batch import Predictions, StepContext, TrainBatch
    from offbeat_engine.fsdp2.build import EngineState
    from offbeat_engine.fsdp2.config import Fsdp2Config
    from offbeat_engine.toolkit.hf.layouts import MakeInputs
    from offbeat_engine.toolkit.step.micro_batches import StepRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How an engine of `state` and `config` answers one call; `request` is the call."""

    request: StepRequest
    state: EngineState
    config: Fsdp2Config
    make_inputs: MakeInputs
    activations: HostActivations | None

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.request.loss_fn is not None

    @property
    def gradient_scale(self) -> float:
        """What the loss is multiplied by so that gradients come to their sum over ranks.

        Peers compute the same share of it, and the gather of their answers adds theirs up: it counts once.
        """
        peers = self.state.peers
        return 1.0 if peers is None else 1.0 / peers.size


def step_of(state: EngineState, config: Fsdp2Config, request: StepRequest) -> Step:
    """Return how an engine of `state` and `config` answers the call `request`."""
    peak = peak_flops(request.device, compute_dtype(config))
    vocab_size = state.scorer.hf.config.get_text_config().vocab_size
    return Step(
        request=replace(
            request,
            cost=state.cost,
            peak_flops=peak,
            replays_experts=True,
            names_top_tokens=True,
            vocab_size=vocab_size,
        ),
        state=state,
        config=config,
        make_inputs=inputs_maker(config),
        activations=HostActivations(request.device) if config.activation_offload else None,
    )


def run_step(step: Step, batch: TrainBatch, ctx: StepContext) -> Predictions:
    """Run every micro-batch of `batch`, fill `ctx`, and return detached predictions in the batch's order."""
    run = MicroBatches(step.request, batch, ctx, lambda whole: _plan(step, whole))
    for number in range(run.num_micro):
        _sync_gradients(step, last=number == run.num_micro - 1)
        predictions, anchor = _forward(step, run, number, ctx.top_k)
        loss = anchor
        if step.trains:
            loss = run.loss(number, predictions, anchor)
        else:
            run.take(number, predictions)
        # All ranks stand between forward and backward here, so all of them can leave. Only the hosts meet: devices go on.
        if run.failed():
            _leave(step, anchor)
            run.raise_failure()
        if step.trains:
            (loss * step.gradient_scale).backward()
    return run.finish()


def _plan(step: Step, batch: TrainBatch) -> list[list[int]]:
    check_lengths(batch, step.state.scorer.sequence_limit)
    step.state.routers.check(batch)
    lengths = [int(length) for length in fed_lengths(batch["loss_mask"]).tolist()]
    together = isinstance(step.make_inputs, RowInputs) and step.make_inputs.share and "group" in batch
    groups = [int(group) for group in batch["group"].tolist()] if together else None
    max_tokens = step.config.micro_batch_tokens * step.config.model_parallel_size
    return plan_micro_batches(
        lengths, max_tokens=max_tokens, padded=not step.config.packing, groups=groups, units=units_of(batch)
    )


def _sync_gradients(step: Step, last: bool) -> None:
    """Reduce gradients, and let go of gathered weights, after the last micro-batch only, where memory allows either.

    Where it does not, gradients are scattered after each, but added up over the copies (if any) after the last. What waits for
    a reduction is in `reduce_dtype`: in bfloat16 none waits, so that micro-batches are added up in float32.
    """
    state, scorer = step.state, step.state.scorer
    if not state.sharded or not step.trains:
        return
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(scorer, FSDPModule)
    reduces_each = step.config.reduce_dtype == Dtype.BFLOAT16
    scorer.set_requires_all_reduce(last or reduces_each)
    if state.gather_once and not reduces_each:
        scorer.set_requires_gradient_sync(last)
        scorer.set_is_last_backward(last)
    if state.gather_once or step.config.reshard == "never":
        scorer.set_reshard_after_backward(last)


def _leave(step: Step, anchor: torch.Tensor) -> None:
    """End a step that failed on some rank: FSDP gives up what it holds of earlier micro-batches in a last backward pass."""
    if step.trains:
        _sync_gradients(step, last=True)
        (anchor.sum() * 0.0).backward()


def _forward(
    step: Step, run: MicroBatches, number: int, top_k: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the predictions [b, T] of a micro-batch, and an outcome of the pass that is there on ranks without one."""
    request, state, micro = step.request, step.state, run.rows(number)
    layout = lay_out(micro, step.make_inputs, request.device, state.peers)
    state.routers.take(layout.experts_NK)
    run.on_device(number)
    wants_entropy_gradient = bool(getattr(request.loss_fn, "entropy_gradient", False))
    with nullcontext() if step.activations is None else step.activations.kept():
        outputs: tuple[torch.Tensor, ...] = state.scorer(layout, wants_entropy_gradient, top_k)
    if state.peers is not None:
        # A loss may look at whole sequences: every peer gets all answers. Their losses add up, see `gradient_scale`.
        outputs = gather_answers(outputs, layout.counts_P, state.peers.group, adds_up=True)
    if micro is None:
        return {}, outputs[0]
    placed = [place(output_M, layout, micro["input_ids"].shape) for output_M in outputs]
    names = (*request.names, "top_logprobs", "top_ids")[: len(placed)]
    return dict(zip(names, placed, strict=True)), outputs[0]
