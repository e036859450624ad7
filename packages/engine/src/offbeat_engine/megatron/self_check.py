"""Before anything is trained: two short sequences through Hugging Face's own forward and through the engine's path."""

# transformers' configs are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

import torch

from offbeat_engine.megatron.loading import hf_config, source_of
from offbeat_engine.megatron.plain import plain_forward
from offbeat_engine.megatron.stepping import names_of, run_step
from offbeat_engine.toolkit.collectives import from_rank_zero, gather
from offbeat_engine.toolkit.probing import Judge, find_non_finite, probe
from offbeat_engine.values import StepContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.megatron.build import Parts
    from offbeat_engine.megatron.held import Held
    from offbeat_engine.megatron.stepping import Step
    from offbeat_engine.world import World

_UNPACKED = "set `packing: false`, with which they agree"
_WITHOUT_TE = "see whether they agree with `transformer_engine: false`"
_NOTHING_HELPS = "no setting of this engine makes them agree: use the engine `fsdp2`, or another model"


class _Plain(TypedDict):
    rows: list[list[float]]
    failed: str | None


def find_difference(step: Step, parts: Parts, waits: World) -> str | None:
    """Return why this model must not be used here, the same on all ranks, or None; a collective.

    Args:
        step: a pass without a loss, in evaluation.
        parts: what was built.
        waits: a world with a deadline long enough for rank 0 to read the whole model, layer by layer.
    """
    odd = _agreed(waits, find_non_finite(_named(parts.held)))
    if odd is not None:
        return odd
    found = hf_config(step.config.model)
    batch = probe(found, step.config.micro_batch_tokens)
    said = from_rank_zero(waits, _plain(step, batch) if waits.rank == 0 else _Plain(rows=[], failed=None))
    if said["failed"] is not None:
        return (
            f"{found.model_type}: Hugging Face's own forward failed on two short sequences ({said['failed']})"
        )
    plain_BT, judge = torch.tensor(said["rows"]), Judge(step.config.dtype, batch["loss_mask"])
    difference = _agreed(waits, _compared(step, parts, judge, plain_BT, batch))
    if difference is None:
        return None
    helps = False
    if step.config.packing:
        padded = replace(step, config=replace(step.config, packing=False))
        helps = _agreed(waits, _compared(padded, parts, judge, plain_BT, batch)) is None
    remedy = _UNPACKED if helps else _NOTHING_HELPS
    if parts.with_te:
        remedy = f"{_WITHOUT_TE}; else {remedy}"
    return f"{found.model_type}: {difference}; {remedy}"


def _agreed(world: World, mine: str | None) -> str | None:
    return next((each for each in gather(world, mine) if each is not None), None)


def _named(held: Sequence[Held]) -> list[tuple[str, torch.Tensor]]:
    return [
        (block.name, block.of(one.param) if one.param.dim() else one.param)
        for one in held
        for block in one.blocks
    ]


def _plain(step: Step, batch: TrainBatch) -> _Plain:
    model = step.config.model
    try:
        with torch.random.fork_rng():
            found = hf_config(model)
            files = source_of(model, step.shape, found.initializer_range)
            rows = plain_forward(found, files, model, batch, step.asked.device)
    except Exception as error:  # noqa: BLE001 what rank 0 alone met becomes every rank's
        return _Plain(rows=[], failed=f"{type(error).__name__}: {error}")
    return _Plain(rows=rows.tolist(), failed=None)


def _compared(
    step: Step, parts: Parts, judge: Judge, plain_BT: torch.Tensor, batch: TrainBatch
) -> str | None:
    """Return both figures in words where this rank has outputs, and they differ; a collective."""
    with parts.groups.lent(), torch.no_grad():
        predictions = run_step(step, batch, StepContext())
    own_BT = predictions.get(names_of(step.config)[0], None)
    return None if own_BT is None else judge.compare(plain_BT, own_BT.cpu())
