import multiprocessing as mp
import socket

import pytest

from offbeat_engine import StateError, World
from offbeat_engine.fsdp2.ranks import gather_ints


def join(rank, address, pipe):
    world = World.join(rank=rank, size=2, store_address=address, timeout_s=60.0)
    pipe.send(gather_ints(world, rank, 10 + rank))
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
            assert pipe.poll(60)
            assert pipe.recv() == [(0, 10), (1, 11)]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def test_a_rank_that_stays_alone_says_so():
    address = free_address()
    with pytest.raises(StateError, match=f"rank 0 of 2 .* at {address} within 0.5 s"):
        World.join(rank=0, size=2, store_address=address, timeout_s=0.5)


def test_several_ranks_must_join_first():
    with pytest.raises(StateError, match=r"World\.join"):
        World(rank=1, size=2).ensure_group()
