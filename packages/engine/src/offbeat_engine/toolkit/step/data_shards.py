"""Rows of a batch cut into data shards, one for each data rank, and gathered back into their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from offbeat_engine.batch import check_keys, units_of
from offbeat_engine.errors import StateError
from offbeat_engine.toolkit.collectives import gather_ints, gather_tensors
from offbeat_engine.toolkit.step.planning import plan_shards

if TYPE_CHECKING:
    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.world import World


# Ranks that work on the same sequences (one `data_rank`) hold the same rows; one of them leads.


def take_shard(data: TrainBatch, data_rank: int, data_size: int) -> tuple[TrainBatch, list[list[int]]]:
    """Return the rows of `data` (perhaps none) of data shard `data_rank`, and the plan: the row numbers of every shard.

    Raises:
        BatchError: `data` lacks a key that every batch has; it is the same on all ranks, so all of them raise.
    """
    check_keys(data)
    lengths = [int(length) for length in data["lengths"].tolist()]
    shards = plan_shards(lengths, data_size, units=units_of(data))
    rows = torch.tensor(shards[data_rank], dtype=torch.int64, device=data["lengths"].device)
    tensors = {str(key): data[key].index_select(0, rows) for key in data.keys()}  # noqa: SIM118 rows otherwise
    return TensorDict(tensors, batch_size=[len(rows)]), shards  # pyright: ignore[reportArgumentType]


def gather_shards(
    data: TensorDict, shards: list[list[int]], world: World, data_rank: int, *, leads: bool
) -> TensorDict:
    """Undo `take_shard`: the leaders' rows, in the first order, on the CPU, on every rank. A collective.

    What other ranks pass is not looked at.

    Raises:
        StateError: a leader's rows are not as many as `take_shard` gave it.
    """
    ranks = gather_ints(world, data_rank, int(leads), data.batch_size[0])
    for rank, (group, is_leader, num_rows) in enumerate(ranks):
        if is_leader and num_rows != len(shards[group]):
            raise StateError(
                f"rank {rank} returns another number of rows than `shard_data` gave it "
                f"({num_rows} for {len(shards[group])}); unshard what came of the last shard"
            )
    mine = {str(key): data[key].cpu() for key in data.keys()}  # noqa: SIM118 rows otherwise
    parts = gather_tensors(world, mine if leads else {})
    rows_of = {group: parts[rank] for rank, (group, is_leader, _) in enumerate(ranks) if is_leader}
    order = torch.tensor([row for shard in shards for row in shard], dtype=torch.int64)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    whole = {
        key: torch.cat([rows_of[group][key] for group in range(len(shards))]).index_select(0, back)
        for key in rows_of[0]
    }
    return TensorDict(whole, batch_size=[len(order)])  # pyright: ignore[reportArgumentType]
