"""Pure plans: which sequences share a micro-batch, and which rank gets which sequence. No torch, no state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from offbeat_engine.batch import check_keys, units_of
from offbeat_engine.errors import BatchError, StateError
from offbeat_engine.toolkit.collectives import gather_ints, gather_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from offbeat_engine.batch import TrainBatch
    from offbeat_engine.toolkit.world import World


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    padded: bool = False,
    groups: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
) -> list[list[int]]:
    """Group sequences into micro-batches of at most `max_tokens` tokens.

    Sequences are taken from long to short, so those that share a micro-batch are of similar length, and the
    first micro-batch is the one that needs the most memory. Given `groups`, whole groups are taken so, by their longest
    sequence: those of a group lie together, for they have their beginning in common. Given `units`, those of a unit are in one
    micro-batch.

    Args:
        lengths: tokens of each sequence (zero is allowed and costs nothing).
        max_tokens: budget of one micro-batch; a longer sequence, or unit, gets a micro-batch of its own.
        padded: count every sequence at the length of the longest one beside it (plain padded rows).
        groups: the group of each sequence; None where every sequence is one.
        units: the unit of each sequence; None where every sequence is one.

    Returns:
        Indices into `lengths`, each exactly once; no micro-batch is empty. The same input gives the same plan.
    """
    if max_tokens < 1:
        raise ValueError(f"`max_tokens` must be at least 1, got {max_tokens}")
    names = range(len(lengths)) if groups is None else groups
    first: dict[int, tuple[int, int]] = {}  # of each group: (- its longest, where it begins)
    for index, name in enumerate(names):
        longest, begin = first.get(name, (0, index))
        first[name] = (min(longest, -lengths[index]), begin)
    order = sorted(range(len(lengths)), key=lambda index: (first[names[index]], -lengths[index], index))
    plan: list[list[int]] = []
    used = width = 0
    for block in _whole(order, units):
        tokens, widest = sum(lengths[index] for index in block), max(lengths[index] for index in block)
        width = max(width, widest)
        together = (len(plan[-1]) + len(block)) * width if padded and plan else used + tokens
        if not plan or together > max_tokens:
            plan.append([])
            used, width = 0, widest
        plan[-1] += block
        used += tokens
    return plan


def plan_shards(
    lengths: Sequence[int], num_ranks: int, *, units: Sequence[int] | None = None
) -> list[list[int]]:
    """Share sequences among ranks so that token counts are close: longest first, always to the lightest rank.

    That greedy rule is Graham's LPT (doi.org/10.1137/0117039): the heaviest rank gets at most 4/3 of the best
    possible. Equal loads go to the rank with fewer sequences, then to the lower rank. Given `units`, the unit of each sequence,
    whole units are shared so.

    Returns:
        One ascending list of indices per rank, possibly empty; the same on every rank for the same input.
    """
    if num_ranks < 1:
        raise ValueError(f"`num_ranks` must be at least 1, got {num_ranks}")
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    blocks = [(sum(lengths[index] for index in block), block) for block in _whole(range(len(lengths)), units)]
    for tokens, block in sorted(blocks, key=lambda one: (-one[0], one[1][0])):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], len(shards[rank]), rank))
        shards[rank] += block
        loads[rank] += tokens
    return [sorted(shard) for shard in shards]


def check_whole(units: Sequence[int] | None, plan: Sequence[Sequence[int]]) -> None:
    """Raise `BatchError` where the micro-batches of `plan` part what `units` says is one."""
    if units is None:
        return
    home: dict[int, int] = {}
    for number, rows in enumerate(plan):
        for row in rows:
            if home.setdefault(units[row], number) != number:
                raise BatchError(
                    f"micro-batches {home[units[row]]} and {number} part the sequences of unit {units[row]}; an engine plans with "
                    "`plan_micro_batches(..., units=units_of(batch))`"
                )


def _whole(order: Iterable[int], units: Sequence[int] | None) -> list[list[int]]:
    """Return the indices of `order` by unit, each unit where its first one stands."""
    blocks: dict[int, list[int]] = {}
    for index in order:
        blocks.setdefault(index if units is None else units[index], []).append(index)
    return list(blocks.values())


def plan_length_classes(lengths: Sequence[int], *, ratio: float = 1.5) -> list[list[int]]:
    """Group sequences whose lengths differ by less than `ratio`, so that padding one to another is cheap.

    Returns:
        Indices into `lengths` of sequences with at least one token, longest class first; each class from long
        to short.
    """
    classes: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if lengths[index] < 1:
            break
        if not classes or lengths[index] * ratio <= lengths[classes[-1][0]]:
            classes.append([])
        classes[-1].append(index)
    return classes


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
