"""Whole tensors for some ranks alone, made of the shards that all of them hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from collections.abc import Collection


def whole_on(tensor: torch.Tensor, ranks: Collection[int], rank: int) -> torch.Tensor | None:
    """Return the whole of `tensor`, in its shape and dtype, on those of `ranks`; None on the others. `rank` is this one.

    A collective of the ranks that hold one copy of the weights among them. Where all of these want it, it is gathered on
    all; else each that wants it is sent the others' shards, and who wants nothing never holds more than a shard.
    """
    here = rank in ranks
    if not isinstance(tensor, DTensor):
        return tensor if here else None
    cuts = [number for number, each in enumerate(tensor.placements) if each.is_shard()]
    placement = tensor.placements[cuts[0]] if len(cuts) == 1 else None
    if not isinstance(placement, Shard):  # not as `fully_shard` cuts by itself
        whole = tensor.full_tensor()
        return whole if here else None
    dim = placement.dim
    group = tensor.device_mesh.get_group(cuts[0])
    members: list[int] = dist.get_process_group_ranks(group)
    wanting = sorted({*members} & {*ranks})
    if wanting == sorted(members):
        return tensor.full_tensor()
    mine = _filled_up(tensor.to_local().movedim(dim, 0), -(-tensor.shape[dim] // len(members)))
    whole = None
    for one in wanting:
        if one != rank:
            dist.gather(mine, dst=one, group=group)
            continue
        # One memory for all shards: they lie in it as in the whole, and what fills up the last is cut off.
        rows = mine.new_empty((len(members) * len(mine), *mine.shape[1:]))
        dist.gather(mine, list(rows.split(len(mine))), dst=one, group=group)
        whole = rows[: tensor.shape[dim]].movedim(0, dim).contiguous()
    return whole


def _filled_up(shard: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return `shard` with rows of zeros after its own: ranks gather equal shapes."""
    if len(shard) == num_rows:
        return shard.contiguous()
    rows = shard.new_zeros((num_rows, *shard.shape[1:]))
    rows[: len(shard)] = shard
    return rows
