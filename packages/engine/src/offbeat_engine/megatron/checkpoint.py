"""The training state of this rank as pieces that any layout of ranks, and any engine, reads; see `toolkit.training_state`.

A rank's share of moments is a run of numbers of a flattened weight, which any cut comes to as boxes: the end of a row, whole rows, the
beginning of a row. So each rank writes and reads its own, and nothing is gathered.
"""

# torch's optimizers keep an untyped dictionary.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.errors import CheckpointError
from offbeat_engine.toolkit import random_state, training_state
from offbeat_engine.toolkit.slices import Region, check_fit
from offbeat_engine.toolkit.training_state import EXP_AVG, EXP_AVG_SQ, WEIGHT, Saved
from offbeat_engine.values import WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from offbeat_engine.megatron.blocks import Block
    from offbeat_engine.megatron.held import Held
    from offbeat_engine.megatron.updater import Share, Updater
    from offbeat_engine.saving import SaveHandle
    from offbeat_engine.toolkit.saves import Destination, Saves
    from offbeat_engine.toolkit.slices import Shape
    from offbeat_engine.toolkit.training_state import Loaded

_MOMENTS = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the weight `block.name`, at `region`, and where its numbers lie in a rank's run of a flattened weight."""

    block: Block
    region: Region
    first: int
    width: int
    columns: slice

    def of(self, run: torch.Tensor) -> torch.Tensor:
        """Return the numbers in a run, a view."""
        if len(self.region.shape) == 1:
            return run[self.first : self.first + self.region.numel]
        num_rows = self.region.shape[0]
        return run[self.first : self.first + num_rows * self.width].view(num_rows, self.width)[
            :, self.columns
        ]


def parts_of(blocks: Sequence[Block], shape: Shape, start: int, stop: int) -> Iterator[Part]:
    """Yield what the numbers `start` to `stop` of a flattened weight of `shape` are of its `blocks`."""
    for box in _boxes(shape, start, stop):
        for block in blocks:
            common = box.common(Region(block.start, block.sizes))
            if common is None:
                continue
            offsets = tuple(
                file + here - there
                for file, here, there in zip(block.offsets, common.offsets, block.start, strict=True)
            )
            row, width = (common.offsets[0], box.shape[1]) if len(shape) > 1 else (0, 1)
            first = (row * shape[1] + box.offsets[1] if len(shape) > 1 else common.offsets[0]) - start
            columns = common.within(box)[-1]
            yield Part(block, Region(offsets, common.shape), first, width, columns)


def _boxes(shape: Shape, start: int, stop: int) -> Iterator[Region]:
    """Yield the boxes that a run of a flattened tensor consists of."""
    if len(shape) == 1:
        yield Region((start,), (stop - start,))
        return
    width = shape[1]
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            size = min(width - column, stop - start)
            yield Region((row, column), (1, size))
        else:
            num_rows = (stop - start) // width
            size = num_rows * width
            yield Region((row, 0), (num_rows, width))
        start += size


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
        for block in one.blocks if one.speaks else ():
            tensor = block.of(one.param.detach())
            yield WeightShard(
                name=WEIGHT + block.name, shape=block.shape, offsets=block.offsets, tensor=tensor
            )
        share = updater.share(one.param)
        if share is None or not share.state or not _writes(one, share):
            continue
        for part in parts_of(one.blocks, tuple(one.param.shape), share.start, share.stop):
            for key, kind in _MOMENTS.items():
                yield WeightShard(
                    name=kind + part.block.name,
                    shape=part.block.shape,
                    offsets=part.region.offsets,
                    tensor=part.of(share.state[key].view(-1)),
                )
    yield from random_state.pieces(saves.world)


def _writes(one: Held, share: Share) -> bool:
    """Whether this rank's moments are those to write: where copies share them out, each writes its own run."""
    return one.alone if share.shared_out else one.speaks


def _steps(held: Sequence[Held], updater: Updater) -> dict[str, float]:
    """Return the updates that this rank's weights have seen."""
    steps: dict[str, float] = {}
    for one in held:
        share = updater.share(one.param)
        if share is not None and share.state:
            steps |= dict.fromkeys((block.name for block in one.blocks), float(share.state["step"]))
    return steps


def load(saves: Saves, held: Sequence[Held], updater: Updater, folder: Path, verified: bool) -> None:
    """Load `folder` in place, whatever layout of ranks, or other engine, has written it; see `training_state.load`."""

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
            _read_moments(one, updater, loaded, _seen(one, updater, loaded, folder))
        states = random_state.read(saves.world, loaded)
        updater.set_num_steps(loaded.meta["scheduled_steps"])
        random_state.restore(saves.world, states)

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


def _read_moments(one: Held, updater: Updater, loaded: Loaded, seen: float) -> None:
    share = updater.share(one.param)
    if share is None:
        return
    share.state.clear()
    if not seen:
        return
    count = share.stop - share.start
    fresh: dict[str, Any] = {key: torch.zeros(count, device=one.param.device) for key in _MOMENTS}
    for part in parts_of(one.blocks, tuple(one.param.shape), share.start, share.stop):
        for key, kind in _MOMENTS.items():
            loaded.reader.fill(kind + part.block.name, part.region, part.of(fresh[key]))
    share.state["step"] = torch.tensor(seen)
    share.state.update({key: tensor.view(share.shape) for key, tensor in fresh.items()})
