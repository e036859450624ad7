"""The training state of this rank as pieces that any layout of ranks, and any engine, reads; see `toolkit.state.training_state`.

A rank's share of master weights and moments is a run of numbers of a flattened weight, which any cut comes to as boxes (`blocks`).
So each rank writes and reads its own, and nothing is gathered. A frozen weight has no master: it is there in what the engine
computes in.
"""

# torch's optimizers keep an untyped dictionary.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat_engine.errors import CheckpointError
from offbeat_engine.megatron.blocks import parts_of
from offbeat_engine.toolkit.state import training_state
from offbeat_engine.toolkit.state.slices import Region, check_fit
from offbeat_engine.toolkit.state.training_state import EXP_AVG, EXP_AVG_SQ, WEIGHT, Saved
from offbeat_engine.values import WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from offbeat_engine.megatron.build import Parts
    from offbeat_engine.megatron.loading import Held
    from offbeat_engine.megatron.updater import Share, Updater
    from offbeat_engine.toolkit.state.saves import Destination, Saves
    from offbeat_engine.toolkit.state.saving import SaveHandle
    from offbeat_engine.toolkit.state.training_state import Loaded

_MOMENTS = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}


def save(saves: Saves, held: Sequence[Held], updater: Updater, where: Destination, block: bool) -> SaveHandle:
    """See `training_state.save`."""
    meta = {
        "step": where.global_step,
        "scheduled_steps": updater.num_steps,
        "optimizer": updater.rule_name,
        "base": {},
        "adapters": {},
    }
    saved = Saved(pieces=lambda: _pieces(saves, held, updater), steps=_steps(held, updater), meta=meta)
    return training_state.save(saves, saved, where, block)


def _pieces(saves: Saves, held: Sequence[Held], updater: Updater) -> Iterator[WeightShard]:
    for one in held:
        share = updater.share(one.param)
        if not one.param.requires_grad:
            for block in one.blocks if one.speaks else ():
                tensor = block.of(one.param.detach()).float()
                yield WeightShard(
                    name=WEIGHT + block.name, shape=block.shape, offsets=block.offsets, tensor=tensor
                )
            continue
        if share is None or not _writes(one, share):
            continue
        runs = {
            WEIGHT: share.master,
            **{kind: share.state[key] for key, kind in _MOMENTS.items() if share.state},
        }
        for part in parts_of(one.blocks, tuple(one.param.shape), share.start, share.stop):
            for kind, run in runs.items():
                yield WeightShard(
                    name=kind + part.block.name,
                    shape=part.block.shape,
                    offsets=part.region.offsets,
                    tensor=part.of(run.detach().view(-1)),
                )
    yield from training_state.pieces(saves.world)


def _writes(one: Held, share: Share) -> bool:
    """Whether this rank's run is one to write: where copies share them out, each writes its own run."""
    return one.alone if share.shared_out else one.speaks


def _steps(held: Sequence[Held], updater: Updater) -> dict[str, float]:
    """Return the updates that this rank's weights have seen."""
    steps: dict[str, float] = {}
    for one in held:
        share = updater.share(one.param)
        if share is not None and share.state:
            steps |= dict.fromkeys((block.name for block in one.blocks), float(share.state["step"]))
    return steps


def load(saves: Saves, parts: Parts, updater: Updater, folder: Path, verified: bool) -> None:
    """Load `folder` in place, whatever layout of ranks, or other engine, has written it; see `training_state.load`."""
    held, known = parts.held, {WEIGHT + name for name in parts.leaving.shapes}

    def check(loaded: Loaded) -> None:
        there = loaded.meta.get("optimizer")
        if loaded.steps and there != updater.rule_name:
            raise CheckpointError(
                f"{folder} holds what the optimizer `{there}` has gathered, and this engine has `{updater.rule_name}`; set "
                "`optimizer.name` back, or train on from the exported weights"
            )
        if loaded.meta.get("adapters"):
            raise CheckpointError(
                f"{folder} holds adapters, and this engine has none; use the engine `fsdp2`"
            )
        training_state.check_no_more(loaded.index, known, str(folder))
        for one in held:
            kinds = [WEIGHT, *(_MOMENTS.values() if _seen(one, updater, loaded, folder) else ())]
            wanted = {
                kind + block.name: (block.shape, torch.float32) for block in one.blocks for kind in kinds
            }
            check_fit(loaded.index, wanted, str(folder))

    def read(loaded: Loaded) -> None:
        for one in held:
            for block in one.blocks:
                region = Region(block.offsets, block.sizes)
                loaded.reader.fill(WEIGHT + block.name, region, block.of(one.param.detach()))
            share = updater.share(one.param)
            if share is not None:
                _read_run(one, share, loaded, _seen(one, updater, loaded, folder))
        states = training_state.read(saves.world, loaded)
        updater.set_num_steps(loaded.meta["scheduled_steps"])
        training_state.restore(saves.world, states)

    training_state.load(saves, folder, verified, check, read)


def _seen(one: Held, updater: Updater, loaded: Loaded, folder: Path) -> float:
    """Return how many updates the moments of a weight have seen; 0 where it is not trained, or there are none."""
    if updater.share(one.param) is None or not loaded.steps or not one.blocks:
        return 0.0
    seen = {loaded.steps.get(block.name) for block in one.blocks}
    step = next(iter(seen))
    if len(seen) != 1 or step is None:
        raise CheckpointError(
            f"{folder} should say how many updates `{one.blocks[0].name}` has seen, got {sorted(map(str, seen))}; "
            "it was frozen there, or its parts were not stepped together"
        )
    return step


def _read_run(one: Held, share: Share, loaded: Loaded, seen: float) -> None:
    """Read master weights, where they are not the weights themselves, and what the optimizer has gathered in `seen` updates."""
    count = share.stop - share.start
    fresh = {key: torch.zeros(count, device=one.param.device) for key in _MOMENTS if seen}
    runs = {_MOMENTS[key]: run for key, run in fresh.items()}
    if share.is_apart:
        runs[WEIGHT] = share.master.detach().view(-1)
    for part in parts_of(one.blocks, tuple(one.param.shape), share.start, share.stop):
        for kind, run in runs.items():
            loaded.reader.fill(kind + part.block.name, part.region, part.of(run))
    share.state.clear()
    if seen:
        share.state["step"] = torch.tensor(seen)
        share.state.update({key: run.view(share.master.shape) for key, run in fresh.items()})
