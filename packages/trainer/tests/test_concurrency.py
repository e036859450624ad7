import asyncio

import pytest

from offbeat_trainer.errors import together


async def test_results_come_in_the_order_of_the_work_not_of_its_end():
    first_may_end = asyncio.Event()

    async def slow():
        await first_may_end.wait()
        return "slow"

    async def fast():
        first_may_end.set()
        return "fast"

    assert await together({"slow": slow(), "fast": fast()}) == ["slow", "fast"]
    assert await together({}) == []


async def test_the_first_error_comes_plain_and_the_others_were_cancelled_and_awaited():
    trail = []
    others_wait = asyncio.Event()

    async def failing():
        await others_wait.wait()
        raise KeyError("the cause")

    async def other():
        others_wait.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # tidying up takes a turn of the loop: it must be waited for
            trail.append("tidied up")
            raise OSError("seen by a peer") from None

    with pytest.raises(KeyError, match="the cause"):
        await together({"other": other(), "failing": failing()})
    assert trail == ["tidied up"]


@pytest.mark.parametrize("explicit", [True, False])
async def test_an_error_keeps_what_it_came_of(explicit):
    async def failing():
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            if explicit:
                raise RuntimeError("a replica died") from error
            raise RuntimeError("a replica died")  # noqa: B904 - as libraries do

    with pytest.raises(RuntimeError) as failed:
        await together({"failing": failing()})
    assert isinstance(failed.value.__cause__ if explicit else failed.value.__context__, OSError)
    assert explicit or failed.value.__cause__ is None


async def test_cancelling_the_caller_cancels_the_work():
    started, ended = asyncio.Event(), []

    async def work():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asyncio.current_task().get_name())

    task = asyncio.create_task(together({"by name": work()}))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["by name"]
