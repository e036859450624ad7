"""Waits that run out, on a virtual clock."""

import asyncio

import pytest

from offbeat_trainer.config import AsyncConfig, LoopConfig
from offbeat_trainer.errors import DeadlineExceeded
from offbeat_trainer.watch.watchdog import Watchdog
from scripted import ScriptedPool, ScriptedRun, run_virtual


def expire(dog, progress_at=(), hold_s=1000.0):
    """Wait for `hold_s` while somebody else waits too; return (seconds until it ended, what was said)."""

    async def main():
        loop = asyncio.get_running_loop()
        for at_s in progress_at:
            loop.call_at(at_s, dog.progress, "generation", f"finished group {at_s}")

        async def other():
            with dog.waiting("the publisher", "replica 3", "flip", bounded=True):
                await asyncio.sleep(1e6)

        beside = asyncio.create_task(other())
        try:
            with dog.waiting("the trainer", "generation", "give the groups of step 7"):
                await asyncio.sleep(hold_s)
        except DeadlineExceeded as error:
            return loop.time(), str(error)
        finally:
            beside.cancel()
        return loop.time(), ""

    return run_virtual(main())


def test_a_wait_without_progress_ends_with_a_diagnosis_in_plain_words():
    said = []
    ended_s, message = expire(Watchdog(timeout_s=60, tell=said.append))
    assert ended_s == 60
    assert message == said[0]
    for words in (
        "nothing has moved for 60 s",
        "the trainer waits for generation to give the groups of step 7, for 60.0 s",
        "last progress of generation: nothing so far",
        "meanwhile the publisher waits for replica 3 to flip, for 60.0 s",
        "resume=auto",
    ):
        assert words in message


def test_progress_of_the_owner_gives_more_time_and_is_told():
    ended_s, message = expire(Watchdog(timeout_s=60, tell=print), progress_at=(50, 100))
    assert ended_s == 160
    assert "finished group 100, 60.0 s ago" in message


def test_progress_of_others_does_not_count():
    dog = Watchdog(timeout_s=60, tell=lambda text: None)

    async def main():
        asyncio.get_running_loop().call_at(50, dog.progress, "somebody else", "something")
        with dog.waiting("the trainer", "generation", "go on"):
            await asyncio.sleep(100)

    with pytest.raises(DeadlineExceeded):
        run_virtual(main())


def test_a_wait_that_ends_in_time_leaves_nothing_behind():
    dog = Watchdog(timeout_s=60)
    assert expire(dog, hold_s=59) == (59, "")
    assert dog.waits == []


async def test_a_cancellation_from_elsewhere_stays_one():
    dog = Watchdog(timeout_s=60)

    async def main():
        with dog.waiting("the trainer", "generation", "go on"):
            await asyncio.sleep(1000)

    task = asyncio.create_task(main())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_run_whose_generation_hangs_ends_within_its_deadline_and_says_who(tmp_path):
    loop = LoopConfig(
        steps=3, prompts_per_step=2, group_size=1, validate_every=0, validation_prompts=1, save_every=0
    )
    pool = ScriptedPool(pace=lambda request: 1e9 if request.sampling.temperature and pool.made > 30 else 0.1)
    run = ScriptedRun(
        folder=tmp_path, loop=loop, asynchrony=AsyncConfig(max_staleness=1), pool=pool,
        watchdog=Watchdog(timeout_s=30, tell=lambda text: None),
    )  # fmt: skip
    with pytest.raises(
        DeadlineExceeded, match=r"the trainer waits for generation to give the groups of step \d"
    ):
        run.go()
