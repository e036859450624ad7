"""Control messages: JSON and integers over a gloo group of their own, and what becomes of a rank that stays away."""

import math

import pytest
import torch
import torch.distributed as dist

from offbeat_engine import World
from offbeat_engine.errors import RankLostError
from offbeat_engine.testing import RankPool
from offbeat_engine.toolkit.collectives import (
    first_failure,
    from_rank_zero,
    gather,
    gather_ints,
    gather_tensors,
)


class Forbidden:
    """Stands in for what would run when unpickled."""

    def __reduce__(self):
        return (print, ("run by a pickle",))


def messages(world):
    """Gather short and long, odd and even; from rank 0 only what rank 0 has."""
    text = "ä" * (10 if world.rank else 5000)
    gathered = gather(world, {"rank": world.rank, "text": text, "nan": math.nan, "third": 1 / 3})
    assert [one["rank"] for one in gathered] == [0, 1]
    assert [len(one["text"]) for one in gathered] == [5000, 10]
    assert all(math.isnan(one["nan"]) and one["third"] == 1 / 3 for one in gathered)
    for length in (0, 1, 500, 502, 503, 504, 505, 9000):  # around the length that needs a second collective
        assert gather(world, "x" * length if world.rank else None) == [None, "x" * length]
        said = from_rank_zero(world, "y" * length if world.rank == 0 else Forbidden())
        assert said == "y" * length
    assert gather_ints(world, world.rank, -(2**62)) == [(0, -(2**62)), (1, -(2**62))]
    return first_failure(world, ValueError("no") if world.rank else None)


def test_every_rank_gets_every_message(two_ranks):
    assert two_ranks.run(messages) == ["rank 1: ValueError: no"] * 2


def no_pickle(world):
    """What only a pickle could carry is refused before anything is sent, so no rank waits for it."""
    with pytest.raises(TypeError, match="not JSON serializable"):
        gather(world, Forbidden())
    if world.rank == 0:
        with pytest.raises(TypeError, match="not JSON serializable"):
            from_rank_zero(world, Forbidden())
    return gather(world, "still together")


def test_nothing_is_pickled(two_ranks):
    assert two_ranks.run(no_pickle) == [["still together"] * 2] * 2


def tensors(world):
    mine = {
        "float": torch.arange(3.0 + world.rank),
        "cut": torch.arange(8).view(4, 2).t(),  # not contiguous
        "flag": torch.tensor([True, False]),
        "half": torch.ones((world.rank, 2), dtype=torch.bfloat16),
        f"only_{world.rank}": torch.tensor(7 + world.rank),
        "none": torch.empty(0, 3),
    }
    return mine, gather_tensors(world, mine)


def test_tensors_of_other_shapes_and_names_come_whole(two_ranks):
    answers = two_ranks.run(tensors)
    expected = [mine for mine, _ in answers]
    for _, came in answers:
        assert [one.keys() for one in came] == [one.keys() for one in expected]
        for left, right in zip(came, expected, strict=True):
            for key, tensor in right.items():
                assert left[key].dtype == tensor.dtype
                assert torch.equal(left[key], tensor)


def apart(world):
    control = world.control_group()
    assert control is world.control_group()
    assert control is not dist.group.WORLD
    assert dist.get_backend(control) == "gloo"
    # A tensor that only rank 0 has sent so far holds up no message.
    work = dist.all_reduce(torch.ones(1), async_op=True) if world.rank == 0 else None
    gathered = gather(world, world.rank)
    work = dist.all_reduce(torch.ones(1), async_op=True) if work is None else work
    work.wait()
    return gathered


def test_messages_do_not_wait_behind_tensors(two_ranks):
    assert two_ranks.run(apart) == [[0, 1], [0, 1]]


def raises_alone(world):
    """Rank 1 does not come; rank 0 is told so after the deadline of control messages, not of tensors."""
    group = dist.group.WORLD
    world = World(rank=world.rank, size=world.size, timeout_s=5.0)
    dist.barrier()  # by the long deadline of tensors: the short one is for ranks that are there
    world.control_group()
    dist.barrier()
    gather(world, None)
    if world.rank:
        return None  # its process lives on, and stays in the group
    with pytest.raises(RankLostError, match="rank 0 of 2 waited for a message of the others, 5 s at most"):
        gather(world, None)
    assert dist.group.WORLD is group
    return True


def test_a_rank_that_stays_away_is_named_within_the_deadline():
    with RankPool(2) as ranks:
        assert ranks.run(raises_alone) == [True, None]


def test_one_rank_needs_no_group():
    value = object()
    assert gather(World(), value) == [value]
    assert from_rank_zero(World(), value) is value
    assert gather_ints(World(), 3) == [(3,)]
    assert first_failure(World(), KeyError("x")) == "KeyError: 'x'"
