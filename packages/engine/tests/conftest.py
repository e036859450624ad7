# pyright: basic
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from offbeat_engine import World
from offbeat_engine.testing import RankPool, make_tiny_model


@pytest.hookimpl(tryfirst=True)  # before markers are asked for
def pytest_collection_modifyitems(items):
    for item in items:
        if {"two_ranks", "four_ranks"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.spawns)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _leave_the_group():
    """An engine of one rank may make a default process group in this process; the next test begins without."""
    was_there = dist.is_initialized()
    yield
    if not was_there:
        World().leave()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A Qwen2 of two layers with weights large enough that a wrong answer looks wrong."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def _pools():
    with ExitStack() as stack:
        yield stack, {}


def _fresh(pools, num_ranks):
    stack, by_size = pools
    if num_ranks in by_size and by_size[num_ranks].is_spent:
        by_size.pop(num_ranks).stop()
    if num_ranks not in by_size:
        by_size[num_ranks] = stack.enter_context(RankPool(num_ranks))
    return by_size[num_ranks]


@pytest.fixture
def two_ranks(_pools):
    """Two real gloo ranks, shared by the tests and started anew after one that left them out of step."""
    return _fresh(_pools, 2)


@pytest.fixture
def four_ranks(_pools):
    """Four of them."""
    return _fresh(_pools, 4)
