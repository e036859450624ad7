"""How a weight lies over ranks: this rank's shard, where that is in the whole, and wholes made of shards. Nothing else knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from offbeat_engine.toolkit.state.slices import Region

if TYPE_CHECKING:
    from collections.abc import Collection

    from offbeat_engine.world import World


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `tensor` as a plain tensor sharing its memory, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of `tensor` on every rank; a collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def region_of(place: torch.Tensor) -> Region:
    """Return which part of the whole tensor this rank holds: a box in it."""
    whole = Region.whole(tuple(place.shape))
    if not isinstance(place, DTensor):
        return whole
    *replicas, shard = place.placements
    assert isinstance(shard, Shard)
    assert all(replica == Replicate() for replica in replicas)
    mesh, size = place.device_mesh, place.shape[shard.dim]
    length = -(-size // mesh.size(mesh.ndim - 1))  # as `torch.chunk` cuts
    start = min(mesh.get_local_rank(mesh.ndim - 1) * length, size)
    shape = tuple(local(place.detach()).shape)
    assert shape[shard.dim] == min(length, size - start)
    return Region(tuple(start if dim == shard.dim else 0 for dim in range(place.dim())), shape)


def is_first_replica(place: torch.Tensor, world: World) -> bool:
    """Return whether this rank's part counts, where several ranks hold replicas of it: of what is whole, the first rank's."""
    if not isinstance(place, DTensor):
        return world.rank == 0
    return place.device_mesh.ndim == 1 or place.device_mesh.get_local_rank(0) == 0


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
