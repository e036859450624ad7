"""Rows of a batch shared among ranks, and gathered back into their order."""

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


# Ranks that work on the same sequences (one `data_rank`) hold the same rows; of each such group one rank speaks.


def take_share(data: TrainBatch, data_rank: int, data_size: int) -> tuple[TrainBatch, list[list[int]]]:
    """Return the rows of `data` (perhaps none) of share `data_rank`, and the plan: the row numbers of every share.

    Raises:
        BatchError: `data` lacks a key that every batch has; it is the same on all ranks, so all of them raise.
    """
    check_keys(data)
    lengths = [int(length) for length in data["lengths"].tolist()]
    shares = plan_shards(lengths, data_size, units=units_of(data))
    rows = torch.tensor(shares[data_rank], dtype=torch.int64, device=data["lengths"].device)
    tensors = {str(key): data[key].index_select(0, rows) for key in data.keys()}  # noqa: SIM118 rows otherwise
    return TensorDict(tensors, batch_size=[len(rows)]), shares  # pyright: ignore[reportArgumentType]


def gather_shares(
    data: TensorDict, shares: list[list[int]], world: World, data_rank: int, *, speaks: bool
) -> TensorDict:
    """Undo `take_share`: the speakers' rows, in the first order, on the CPU, on every rank. A collective.

    What a rank passes that does not speak is not looked at.

    Raises:
        StateError: a speaker's rows are not as many as `take_share` gave it.
    """
    said = gather_ints(world, data_rank, int(speaks), data.batch_size[0])
    for rank, (group, is_speaker, num_rows) in enumerate(said):
        if is_speaker and num_rows != len(shares[group]):
            raise StateError(
                f"rank {rank} returns another number of rows than `shard_data` gave it "
                f"({num_rows} for {len(shares[group])}); unshard what came of the last share"
            )
    mine = {str(key): data[key].cpu() for key in data.keys()}  # noqa: SIM118 rows otherwise
    parts = gather_tensors(world, mine if speaks else {})
    of_share = {group: parts[rank] for rank, (group, is_speaker, _) in enumerate(said) if is_speaker}
    order = torch.tensor([row for share in shares for row in share], dtype=torch.int64)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    whole = {
        key: torch.cat([of_share[group][key] for group in range(len(shares))]).index_select(0, back)
        for key in of_share[0]
    }
    return TensorDict(whole, batch_size=[len(order)])  # pyright: ignore[reportArgumentType]
