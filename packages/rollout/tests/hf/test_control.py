"""Control calls of the Transformers adapter that are cancelled, late, or overlap: the engine outlives them all."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import pytest_asyncio

from offbeat_rollout import (
    EngineStateError,
    Finish,
    GenerateRequest,
    PauseMode,
    RolloutConfig,
    SamplingParams,
)
from offbeat_rollout.hf import HfEngine
from offbeat_rollout.testing import make_tiny_model

DEADLINE_S = 600.0


def request(name, max_tokens=8):
    return GenerateRequest(
        request_id=name, prompt_ids=(3, 4, 5), sampling=SamplingParams(max_tokens=max_tokens, seed=1)
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(loop_scope="module")
async def engine(path):
    engine = HfEngine(RolloutConfig(model_path=path, max_model_len=512))
    await engine.start()
    yield engine
    await engine.stop()


async def begun(engine, name, max_tokens):
    """Return a request under way."""
    made = (await engine.health()).tokens_made
    work = asyncio.create_task(engine.generate(request(name, max_tokens)))
    deadline_s = time.monotonic() + DEADLINE_S
    while (await engine.health()).tokens_made == made:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0)
    return work


async def test_cancelled_control_calls_hurt_nobody(engine):
    """Some are cancelled while they queue for the end of a token, some in the middle, some afterwards."""
    work = await begun(engine, "long", 400)
    for ticks in range(40):
        call = asyncio.create_task(engine.abort(["nobody"]))
        await asyncio.sleep(0 if ticks % 2 else 0.001)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert len((await asyncio.wait_for(work, DEADLINE_S)).token_ids) == 400
    assert (await engine.health()).ok


async def test_a_command_cancelled_while_it_queues_is_not_run(engine):
    """What nobody waits for must not change anything later: a pause, say, whose caller has gone."""
    work = await begun(engine, "long", 400)
    ran, go_on = [], threading.Event()
    engine._worker.call(lambda: go_on.wait(DEADLINE_S))  # the thread is at this; the others queue
    commands = [engine._worker.call(lambda i=i: ran.append(i)) for i in range(3)]
    commands[1].cancel()
    go_on.set()
    await asyncio.wait_for(
        asyncio.gather(*(asyncio.wrap_future(one) for one in (commands[0], commands[2]))), DEADLINE_S
    )
    assert ran == [0, 2]
    await asyncio.wait_for(work, DEADLINE_S)


@pytest.mark.parametrize("modes", [(PauseMode.WAIT, PauseMode.WAIT), (PauseMode.WAIT, PauseMode.KEEP)])
async def test_a_second_pause_joins_the_first(engine, modes):
    work = await begun(engine, "long", 200)
    pauses = [asyncio.create_task(engine.pause(mode)) for mode in modes]
    if modes[1] is PauseMode.KEEP:
        await asyncio.wait_for(pauses[1], DEADLINE_S)
        assert not work.done(), "frozen where it was"
        assert not pauses[0].done(), "the first still waits for it to end"
        await engine.resume()
        with pytest.raises(EngineStateError, match="resumed while a pause was still waiting"):
            await asyncio.wait_for(pauses[0], DEADLINE_S)
        await asyncio.wait_for(work, DEADLINE_S)
        return
    await asyncio.wait_for(asyncio.gather(*pauses), DEADLINE_S)
    assert work.done()
    assert (await engine.health()).paused
    await engine.resume()


async def test_a_pause_that_aborts_ends_the_wait_of_one_that_waits(engine):
    work = await begun(engine, "long", 400)
    waiting = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    await asyncio.wait_for(engine.pause(PauseMode.ABORT), DEADLINE_S)
    assert (await asyncio.wait_for(work, DEADLINE_S)).finish is Finish.ABORT
    await asyncio.wait_for(waiting, DEADLINE_S)
    await engine.resume()
    assert len((await engine.generate(request("next"))).token_ids) == 8


async def test_a_wait_whose_caller_has_gone_still_ends_in_a_pause_that_one_resume_lifts(engine):
    work = await begun(engine, "long", 300)
    waiting = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len((await asyncio.wait_for(work, DEADLINE_S)).token_ids) == 300
    await engine.resume()
    assert len((await asyncio.wait_for(engine.generate(request("next")), DEADLINE_S)).token_ids) == 8


async def test_a_late_pause_does_not_come_when_nobody_expects_it(path):
    engine = HfEngine(RolloutConfig(model_path=path, max_model_len=512, request_timeout_s=60.0))
    await engine.start()
    work = await begun(engine, "long", 400)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.pause(PauseMode.WAIT)
    newcomer = await asyncio.wait_for(engine.generate(request("newcomer")), DEADLINE_S)
    assert len(newcomer.token_ids) == 8
    assert not work.done(), "it did not have to wait for the others to end"
    assert len((await asyncio.wait_for(work, DEADLINE_S)).token_ids) == 400
    assert not (await engine.health()).paused
    await engine.stop()


async def test_a_cancelled_sleep_leaves_an_engine_that_knows_whether_it_sleeps(engine):
    go_on = threading.Event()
    moving = engine._worker._model.to

    def slowly(device):
        go_on.wait(DEADLINE_S)
        return moving(device)

    engine._worker._model.to = slowly
    call = asyncio.create_task(engine.sleep(1))
    await asyncio.sleep(0.1)  # the thread is at it
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    go_on.set()
    await engine._ask(lambda: None, "wait for the thread")
    with pytest.raises(EngineStateError, match="sleeps"):
        await engine.generate(request("tired"))
    await engine.wake()
    assert len((await engine.generate(request("fresh"))).token_ids) == 8


async def test_an_abort_of_the_last_request_ends_the_wait(engine):
    work = await begun(engine, "long", 400)
    waiting = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0.01)
    await engine.abort(["long"])
    await asyncio.wait_for(asyncio.gather(work, waiting), DEADLINE_S)
    assert (await engine.health()).paused
    await engine.resume()


async def test_stopping_ends_a_pause_that_waits(path):
    engine = HfEngine(RolloutConfig(model_path=path, max_model_len=512))
    await engine.start()
    work = await begun(engine, "long", 500)
    waiting = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0.01)
    await engine.stop()
    results = await asyncio.wait_for(asyncio.gather(work, waiting, return_exceptions=True), DEADLINE_S)
    assert [type(error) for error in results] == [EngineStateError] * 2
