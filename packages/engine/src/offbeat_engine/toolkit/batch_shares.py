"""Rows of a batch shared among ranks, and gathered back into their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from offbeat_engine.batch import check_keys
from offbeat_engine.errors import StateError
from offbeat_engine.toolkit.collectives import gather, gather_tensors
from offbeat_engine.toolkit.planning import plan_shards

if TYPE_CHECKING:
    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.world import World


# Ranks that share the tokens of their sequences (`num_peers` consecutive ones) hold the same rows.


def take_share(data: TrainBatch, world: World, num_peers: int = 1) -> tuple[TrainBatch, list[list[int]]]:
    """Return this rank's rows of `data` (perhaps none) and the plan: every group of peers' row numbers.

    Raises:
        BatchError: `data` lacks a key that every batch has; it is the same on all ranks, so all of them raise.
    """
    check_keys(data)
    lengths = [int(length) for length in data["lengths"].tolist()]
    shares = plan_shards(lengths, world.size // num_peers)
    rows = torch.tensor(shares[world.rank // num_peers], dtype=torch.int64, device=data["lengths"].device)
    tensors = {str(key): data[key].index_select(0, rows) for key in data.keys()}  # noqa: SIM118 rows otherwise
    return TensorDict(tensors, batch_size=[len(rows)]), shares  # pyright: ignore[reportArgumentType]


def gather_shares(data: TensorDict, shares: list[list[int]], world: World, num_peers: int = 1) -> TensorDict:
    """Undo `take_share`: every rank passes its rows and gets all of them, in the first order, on the CPU."""
    expected, got = len(shares[world.rank // num_peers]), data.batch_size[0]
    fits = gather(world, got == expected)
    if not all(fits):
        raise StateError(
            f"rank {fits.index(False)} returns another number of rows than `shard_data` gave it "
            f"(here: {got} for {expected}); unshard what came of the last share"
        )
    mine = {str(key): data[key].cpu() for key in data.keys()}  # noqa: SIM118 rows otherwise
    # Peers hold the same rows: the first of them speaks for all.
    parts = gather_tensors(world, mine if world.rank % num_peers == 0 else {})[::num_peers]
    order = torch.tensor([row for share in shares for row in share], dtype=torch.int64)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    joined = {key: torch.cat([part[key] for part in parts]).index_select(0, back) for key in mine}
    return TensorDict(joined, batch_size=[len(order)])  # pyright: ignore[reportArgumentType]
