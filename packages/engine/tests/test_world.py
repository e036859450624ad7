import multiprocessing as mp
import socket
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from offbeat_engine import StateError, World
from offbeat_engine.testing import RankPool
from offbeat_engine.testing.runner import Ranks
from offbeat_engine.toolkit.collectives import gather_ints


def listens_at(port):
    """Return the addresses at which somebody of this machine listens on `port`, as the kernel writes them."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        words[1].partition(":")[0]
        for words in lines
        if words[3] == "0A" and words[1].endswith(f":{port:04X}")
    ]


def join(rank, address, pipe):
    world = World.join(rank=rank, size=2, store_address=address, timeout_s=600.0)
    pipe.send((gather_ints(world, rank, 10 + rank), listens_at(int(address.rpartition(":")[2]))))
    world.leave()


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
def test_two_processes_meet_at_an_address():
    context, address, pipes, processes = mp.get_context("fork"), free_address(), [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=join, args=(rank, address, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        for pipe in pipes:
            assert pipe.poll(600)
            assert pipe.recv() == ([(0, 10), (1, 11)], ["0100007F"]), (
                "the store listens at the one address, 127.0.0.1"
            )
    finally:
        for process in processes:
            process.join(60)
            process.kill()


def test_a_rank_that_stays_alone_says_so():
    address = free_address()
    with pytest.raises(StateError, match=f"rank 0 of 2 .* at {address} within 0.5 s"):
        World.join(rank=0, size=2, store_address=address, timeout_s=0.5)


def halves_and_pairs(world):
    """Sum over each group tells who is in it."""
    sums = []
    for stride in (1, 2):
        mine = world.split(2, 600.0, stride=stride)
        tensor = torch.tensor(10**world.rank)
        dist.all_reduce(tensor, group=mine.group)
        sums.append((mine.rank, int(tensor)))
        assert world.split(2, 600.0, stride=stride) is mine, "engines share it"
        assert world.split(2, 500.0, stride=stride) is not mine
    with pytest.raises(StateError, match="4 ranks cannot be split into groups of 3, 1 apart"):
        world.split(3, 600.0)
    return sums


def test_ranks_split_into_neighbours_and_into_counterparts(four_ranks):
    assert four_ranks.run(halves_and_pairs) == [
        [(0, 11), (0, 101)],
        [(1, 11), (0, 1010)],
        [(0, 1100), (1, 101)],
        [(1, 1100), (1, 1010)],
    ]


def waits_for_nobody(world):
    group = world.split(2, 5.0).group
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
            dist.all_reduce(torch.zeros(1), group=group)
    return True


def test_a_group_waits_no_longer_than_it_was_told():
    with RankPool(2) as ranks:
        assert ranks.run(waits_for_nobody) == [True, True]


def test_several_ranks_must_join_first():
    with pytest.raises(StateError, match=r"World\.join"):
        World(rank=1, size=2).ensure_group()


def many_groups(world):
    for timeout_s in range(600, 650):
        world.split(2, timeout_s)
    return True


def test_ranks_with_so_many_groups_that_their_threads_take_the_machine_are_started_anew():
    with closing(Ranks()) as ranks:
        pool = ranks.pool(2)
        assert ranks.pool(2) is pool
        pool.run(many_groups)
        assert pool.is_spent
        assert ranks.pool(2) is not pool
