"""What a rank holds of tensors that torch distributes: the layout that follows from their placements."""

# torch types its distributed tensors in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.values import Cut

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from offbeat_ckptsync.values import Layout


def layout_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Layout:
    """Return the slice that this rank holds of each DTensor; other tensors are not named: it holds them whole.

    Raises:
        ManifestError: a tensor is sharded along several dimensions, or has partial sums in place of values.
    """
    return {name: _cuts(name, tensor) for name, tensor in tensors if _is_sharded(tensor)}


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank's own memory of a tensor, DTensor or not; writing to it writes to the tensor."""
    return tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def is_distributed(tensor: torch.Tensor) -> bool:
    """Say whether it is one of torch's DTensors."""
    module = sys.modules.get(
        "torch.distributed.tensor"
    )  # slow to import; without it there are no such tensors
    return module is not None and isinstance(tensor, module.DTensor)


def _is_sharded(tensor: torch.Tensor) -> bool:
    return is_distributed(tensor) and not all(each.is_replicate() for each in tensor.placements)  # type: ignore[attr-defined]


def _cuts(name: str, tensor: torch.Tensor) -> tuple[Cut, ...]:
    """Follow the mesh: each of its dimensions that shards halves the stretch that the one before it left, as torch does."""
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    dims = {each.dim for each in placements if each.is_shard()}
    if len(dims) != 1 or any(not each.is_shard() and not each.is_replicate() for each in placements):
        raise ManifestError(
            f"{name!r} is placed as {placements}; a rank can be given slices along one dimension"
        )
    (dim,) = dims
    start, length = 0, tensor.shape[dim]
    for mesh_dim, each in enumerate(placements):
        if each.is_shard():
            size, rank = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
            chunk = -(-length // size)
            first = min(rank * chunk, length)
            start, length = start + first, min(chunk, length - first)
    if tuple(tensor.to_local().shape) != (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]):  # type: ignore[attr-defined]
        raise ManifestError(f"{name!r} is sharded as {placements} in another way than torch's plain one")
    return (Cut(dim=dim, start=start, length=length),)
