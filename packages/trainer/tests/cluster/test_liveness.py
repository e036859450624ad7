"""Work that is watched: what ends it, and whose word counts. No cluster is started."""

import asyncio

import pytest

from offbeat_trainer.errors import WorkerGone


@pytest.fixture
def guarded():
    from offbeat_trainer.cluster.waits import guarded

    return guarded


async def for_ever():
    await asyncio.Event().wait()


async def fails(error, after_s=0.0):
    await asyncio.sleep(after_s)
    raise error


async def says(value):
    await asyncio.sleep(0)
    return value


async def test_work_that_ends_ends_the_watch(guarded):
    ended = asyncio.Event()

    async def watch():
        try:
            await for_ever()
        finally:
            ended.set()

    assert await guarded(says("done"), watch(), name="work") == "done"
    assert ended.is_set()


async def test_what_the_watch_finds_ends_the_work_which_may_tidy_up_first(guarded):
    tidy = []

    async def work():
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0.01)
            tidy.append("up")

    with pytest.raises(WorkerGone, match="rank 1"):
        await guarded(work(), fails(WorkerGone("rank 1 died")), name="work")
    assert tidy == ["up"]


async def test_an_error_of_the_work_is_its_own(guarded):
    with pytest.raises(KeyError):
        await guarded(fails(KeyError("k")), for_ever(), name="work")


async def test_where_both_fail_the_watch_knows_better(guarded):
    with pytest.raises(WorkerGone):
        await guarded(fails(RuntimeError("closed by peer")), fails(WorkerGone("rank 1 died")), name="work")


async def test_who_is_cancelled_leaves_nothing_behind(guarded):
    running = asyncio.create_task(guarded(for_ever(), for_ever(), name="work"))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [task for task in asyncio.all_tasks() if "work" in task.get_name()] == []
