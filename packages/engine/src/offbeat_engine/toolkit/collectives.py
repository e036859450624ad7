"""The few collectives the engine needs outside FSDP, each a plain function when there is one rank."""

# torch and tensordict are typed in part: `tolist` and keyed access answer with unknown types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from offbeat_engine.world import World

T = TypeVar("T")


def gather(world: World, value: T) -> list[T]:
    """Return every rank's `value` (a small picklable), in rank order, on every rank."""
    if world.size == 1:
        return [value]
    values: list[T | None] = [None] * world.size
    dist.all_gather_object(values, value)
    return cast("list[T]", values)


def gather_ints(world: World, *values: int) -> list[tuple[int, ...]]:
    """Return every rank's integers, in rank order, on every rank: one small tensor collective."""
    if world.size == 1:
        return [values]
    mine = torch.tensor(values, dtype=torch.int64, device=compute_device(world))
    parts = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(parts, mine)
    return [tuple(map(int, part.tolist())) for part in parts]


def sum_tensor(world: World, tensor: torch.Tensor) -> torch.Tensor:
    """Add `tensor` up over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def from_rank_zero(world: World, value: T) -> T:
    """Return rank 0's `value` on every rank; what the others pass is ignored."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def first_failure(world: World, error: BaseException | None) -> str | None:
    """Let the ranks agree: return the lowest failed rank's message, the same on all ranks, or None.

    Every rank must call this at the same place, so that all raise together or none does.
    """
    mine = None if error is None else f"{type(error).__name__}: {error}"
    for rank, message in enumerate(gather(world, mine)):
        if message is not None:
            return message if world.size == 1 else f"rank {rank}: {message}"
    return None


def compute_device(world: World) -> torch.device:
    """Return the device this rank computes on."""
    return torch.device("cuda", world.local_rank) if world.device == "cuda" else torch.device(world.device)
