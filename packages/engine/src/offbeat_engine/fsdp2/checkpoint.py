"""Checkpoints of the whole training state: what this engine holds, as pieces of tensors that any layout of ranks reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from offbeat_engine.errors import CheckpointError
from offbeat_engine.fsdp2.weights import lora
from offbeat_engine.fsdp2.weights.export import is_first_replica, local, named_tensors, region_of
from offbeat_engine.fsdp2.weights.state_names import LocalPart, StateNames
from offbeat_engine.toolkit.state import training_state
from offbeat_engine.toolkit.state.slices import Region, check_fit
from offbeat_engine.toolkit.state.training_state import WEIGHT, Saved

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from offbeat_engine.batch import WeightShard
    from offbeat_engine.fsdp2.memory.updater import Moments, Updater
    from offbeat_engine.fsdp2.model.trainable import Scorer
    from offbeat_engine.toolkit.state.saves import Destination, SaveHandle, Saves
    from offbeat_engine.toolkit.state.training_state import Loaded
    from offbeat_engine.toolkit.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a checkpoint is taken of: trained and untrained weights, optimizer, schedule, random state.

    `base` are fingerprints (see `lora.fingerprint`) of the weights that a checkpoint does not hold, `adapters` says
    what its matrices A and B mean (see `lora.described`).
    """

    world: World
    names: StateNames
    updater: Updater
    untrained: dict[str, torch.Tensor]
    base: dict[str, int]
    adapters: dict[str, Any]


def target_of(world: World, scorer: Scorer, updater: Updater) -> Target:
    """Return what there is to save of `scorer`, which `updater` steps."""
    untrained = {
        name: tensor
        for name, tensor in named_tensors(scorer.hf).items()
        if name not in updater.params and name not in scorer.base
    }
    return Target(
        world=world,
        names=StateNames(scorer.hf),
        updater=updater,
        untrained=untrained,
        base=scorer.base,
        adapters=lora.described(scorer.hf),
    )


def save(saves: Saves, target: Target, where: Destination, block: bool) -> SaveHandle:
    """See `training_state.save`."""
    moments = target.updater.moments()
    meta = {
        "step": where.global_step,
        "scheduled_steps": target.updater.num_steps,
        "optimizer": str(target.updater.rule_name),
        "base": target.base,
        "adapters": target.adapters,
    }
    saved = Saved(pieces=lambda: _pieces(target, moments), steps=_steps(target, moments), meta=meta)
    return training_state.save(saves, saved, where, block)


def _pieces(target: Target, moments: Moments) -> Iterator[WeightShard]:
    """Yield what this rank writes: of replicas the first."""
    world = target.world
    for name, tensor in _weights(target):
        if is_first_replica(tensor, world):
            yield from target.names.pieces(_part_of_weight(name, tensor))
    for one in _parts_of_moments(target, moments):
        if is_first_replica(target.updater.params[one.name], world):
            yield from target.names.pieces(one)
    yield from training_state.pieces(target.world)


def _steps(target: Target, moments: Moments) -> dict[str, float]:
    """Return the updates that each trained weight has seen; none at all before the first step of any."""
    if not moments or target.world.rank:  # a rank without rows of a weight may not have counted
        return {}
    # Read once a weight, which waits for the device: an expert's weight has a name for each expert.
    steps = {name: float(moments[name]["step"]) if name in moments else 0.0 for name in target.updater.params}
    return {called: step for name, step in steps.items() for called in target.names.names(name)}


def _weights(target: Target) -> Iterator[tuple[str, torch.Tensor]]:
    yield from target.updater.params.items()
    yield from target.untrained.items()


def _part_of_weight(name: str, tensor: torch.Tensor) -> LocalPart:
    tensor = tensor.detach()
    region, shape = region_of(tensor), tuple(tensor.shape)
    return LocalPart(kind=WEIGHT, name=name, values=local(tensor), region=region, shape=shape)


def _parts_of_moments(target: Target, moments: Moments) -> Iterator[LocalPart]:
    for name, state in moments.items():
        param = target.updater.params[name]
        cut = isinstance(param, DTensor)
        mine = region_of(param)
        for key, tensor in state.items():
            if key == "step":
                continue
            region, shape = Region.whole(tuple(tensor.shape)), tuple(tensor.shape)
            if cut and region.shape == mine.shape:
                region, shape = mine, tuple(param.shape)
            elif cut:  # codes and scales of eight bits, of as many rows
                region = Region((mine.offsets[0], *region.offsets[1:]), region.shape)
                shape = (param.shape[0], *shape[1:])
            yield LocalPart(kind=f"{key}/", name=name, values=tensor, region=region, shape=shape)


def load(saves: Saves, target: Target, folder: Path, verified: bool) -> None:
    """Load `folder` in place, whatever layout of ranks has written it; see `training_state.load`."""
    updater, names = target.updater, target.names
    moments: Moments = {}

    def check(loaded: Loaded) -> None:
        # First: an adapted weight of the base has another name than one that is not, which says less.
        _check_adapters(target.adapters, loaded.meta.get("adapters", {}), folder)
        _check_base(target.base, loaded.meta.get("base", {}), folder)
        _check_optimizer(str(updater.rule_name), loaded, folder)
        wanted: dict[str, Any] = {}
        for name, tensor in _weights(target):
            wanted |= names.wanted(_part_of_weight(name, tensor))
        check_fit(loaded.index, wanted, str(folder))
        training_state.check_no_more(loaded.index, wanted, str(folder))
        moments.update(_empty_moments(target, loaded.steps, folder))
        for one in _parts_of_moments(target, moments):
            check_fit(loaded.index, names.wanted(one), str(folder))

    def read(loaded: Loaded) -> None:
        for name, tensor in _weights(target):
            names.fill(_part_of_weight(name, tensor), loaded.reader)
        for one in _parts_of_moments(target, moments):
            names.fill(one, loaded.reader)
        states = training_state.read(saves.world, loaded)
        updater.set_moments(moments)
        updater.set_num_steps(loaded.meta["scheduled_steps"])
        training_state.restore(saves.world, states)

    training_state.load(saves, folder, verified, check, read)


def _empty_moments(target: Target, steps: Mapping[str, float], folder: Path) -> Moments:
    """Return memory for the moments of what has been stepped, which says how often."""
    if not steps:
        return {}
    moments: Moments = {}
    for name, state in target.updater.empty_moments().items():
        seen = {steps.get(called) for called in target.names.names(name)}
        step = next(iter(seen))
        if len(seen) != 1 or step is None:
            raise CheckpointError(
                f"checkpoint {folder}: optimizer state of `{name}` is incomplete (update counts of its parts: "
                f"{', '.join(sorted(map(str, seen)))}). If it was frozen in that run, freeze it here too; else start from the "
                "exported weights"
            )
        if step:
            state["step"].fill_(step)
            moments[name] = state
    return moments


def _check_optimizer(here: str, loaded: Loaded, folder: Path) -> None:
    there = loaded.meta.get("optimizer")
    if loaded.steps and there != here:
        raise CheckpointError(
            f"{folder} holds what the optimizer `{there}` has gathered, and this engine has `{here}`; set `optimizer.name` back, "
            "or train on from the exported weights"
        )


def _check_base(here: dict[str, int], there: dict[str, int], folder: Path) -> None:
    odd = sorted({*here.items()} ^ {*there.items()})
    if odd:
        name = odd[0][0]
        what = "has other values" if name in here and name in there else "is frozen in only one of the two"
        raise CheckpointError(
            f"{folder} holds adapters of another base: `{name}` {what}; load the model they were trained on"
        )


def _check_adapters(here: dict[str, Any], there: dict[str, Any], folder: Path) -> None:
    """Refuse matrices of another meaning: another alpha fits every shape and scales the adapter otherwise."""
    # A checkpoint that does not describe its adapters was written before there was a description.
    for setting in sorted(here.keys() & there.keys()):
        if here[setting] != there[setting]:
            raise CheckpointError(
                f"{folder} holds adapters of `lora.{setting}` {_said(there[setting])}, and this engine has "
                f"{_said(here[setting])}; set it back, or train new adapters"
            )


def _said(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
