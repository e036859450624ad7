"""Before anything is trained: two short sequences through Hugging Face's own forward and through the engine's path."""

# transformers' configs are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

import torch

from offbeat_engine.megatron import families
from offbeat_engine.megatron.loading import hf_config, source_of
from offbeat_engine.megatron.plain import plain_forward
from offbeat_engine.megatron.stepping import names_of, run_step
from offbeat_engine.toolkit.collectives import from_rank_zero, gather
from offbeat_engine.toolkit.hf.probing import Judge, find_non_finite, probe
from offbeat_engine.values import StepContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.megatron.build import Parts
    from offbeat_engine.megatron.config import MegatronConfig
    from offbeat_engine.megatron.held import Held
    from offbeat_engine.megatron.stepping import Step
    from offbeat_engine.world import World

_UNPACKED = "set `packing: false`, with which they agree"
_WITHOUT_TE = "see whether they agree with `transformer_engine: false`"
_NOTHING_HELPS = "no setting of this engine makes them agree: use the engine `fsdp2`, or another model"


class Reference(TypedDict):
    """What Hugging Face's own forward makes of the two sequences, or why it failed; plain, so that it crosses ranks."""

    rows: list[list[float]]
    failed: str | None


def reference_of(config: MegatronConfig, device: torch.device, waits: World) -> Reference:
    """Compute it on rank 0, before anything else lies on its device; a collective of `waits`, as below."""
    mine = _plain(config, device) if waits.rank == 0 else Reference(rows=[], failed=None)
    return from_rank_zero(waits, mine)


def find_difference(step: Step, parts: Parts, waits: World, reference: Reference) -> str | None:
    """Return why this model must not be used here, the same on all ranks, or None; a collective.

    Args:
        step: a pass without a loss, in evaluation.
        parts: what was built.
        waits: a world with a deadline long enough for rank 0 to read the whole model, layer by layer.
        reference: what `reference_of` gave.
    """
    odd = _agreed(waits, find_non_finite(_named(parts.held)))
    if odd is not None:
        return odd
    found = hf_config(step.config.model)
    batch = probe(found, step.config.micro_batch_tokens)
    if (failed := reference["failed"]) is not None:
        return f"{found.model_type}: Hugging Face's own forward failed on two short sequences ({failed})"
    plain_BT, judge = torch.tensor(reference["rows"]), Judge(step.config.dtype, batch["loss_mask"])
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


def _plain(config: MegatronConfig, device: torch.device) -> Reference:
    model = config.model
    try:
        with torch.random.fork_rng():
            found = hf_config(model)
            files = source_of(model, families.shape_of(found, model.head), found.initializer_range)
            batch = probe(found, config.micro_batch_tokens)
            rows = plain_forward(found, files, model, batch, device)
    except torch.OutOfMemoryError as error:
        why = f"one layer in float32, beside embedding and head, does not fit on {device}: {error}"
        return Reference(rows=[], failed=why)
    except Exception as error:  # noqa: BLE001 what rank 0 alone met becomes every rank's
        return Reference(rows=[], failed=f"{type(error).__name__}: {error}")
    return Reference(rows=rows.tolist(), failed=None)


def _compared(
    step: Step, parts: Parts, judge: Judge, plain_BT: torch.Tensor, batch: TrainBatch
) -> str | None:
    """Return both figures in words where this rank has outputs, and they differ; a collective."""
    with parts.groups.lent(), torch.no_grad():
        predictions = run_step(step, batch, StepContext())
    own_BT = predictions.get(names_of(step.config)[0], None)
    return None if own_BT is None else judge.compare(plain_BT, own_BT.cpu())
