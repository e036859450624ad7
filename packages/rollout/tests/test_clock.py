"""A slow request is its own fault; queueing and pauses cost it nothing; an engine that stands still is told apart."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from dataclasses import replace

import pytest

from offbeat_rollout import (
    EngineStateError,
    Finish,
    GenerateRequest,
    PauseMode,
    RequestTimeout,
    RolloutConfig,
    SamplingParams,
)
from offbeat_rollout.hf import HfEngine
from offbeat_rollout.testing import ScriptedRollout, make_tiny_model
from offbeat_rollout.toolkit.clock import RequestClock, Work

DEADLINE_S = 600.0


def request(name, max_tokens):
    return GenerateRequest(
        request_id=name, prompt_ids=(3, 4), sampling=SamplingParams(max_tokens=max_tokens, seed=1)
    )


class Starving(ScriptedRollout):
    """Makes one token of the request `starved` and then none, while others get theirs."""

    def _advance(self, running):
        if running.request.request_id != "starved" or not running.versions:
            super()._advance(running)


async def test_a_request_that_gets_no_token_fails_and_the_engine_is_well():
    config = RolloutConfig(model_path="", max_model_len=100_000, request_timeout_s=0.2)
    engine = Starving(config, token_s=0.001)
    await engine.start()
    others = asyncio.create_task(engine.generate(request("long", 90_000)))
    with pytest.raises(RequestTimeout, match=r"'starved' got no token in 0\.2 s in which others got some"):
        await engine.generate(request("starved", 10))
    health = await engine.health()
    assert (health.ok, health.num_running) == (True, 1)
    await engine.abort(["long"])
    assert (await others).finish is Finish.ABORT
    assert (await engine.generate(request("short", 1))).finish is Finish.LENGTH
    await engine.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_a_request_that_gets_tokens_may_take_longer():
    config = RolloutConfig(model_path="", max_model_len=5_000, request_timeout_s=0.2)
    engine = ScriptedRollout(config, token_s=0.001)
    await engine.start()
    assert len((await engine.generate(request("long", 4_000))).token_ids) == 4_000
    await engine.stop()


async def test_a_pause_is_no_time_of_the_request():
    engine = ScriptedRollout(RolloutConfig(model_path="", request_timeout_s=0.2), token_s=0.001)
    await engine.start()
    await engine.pause(PauseMode.KEEP)
    assert (await engine.health()).paused
    work = asyncio.create_task(engine.generate(request("patient", 3)))
    await asyncio.wait([work], timeout=1.0)
    assert not work.done(), "it was ended while the engine was paused"
    await engine.resume()
    assert len((await asyncio.wait_for(work, DEADLINE_S)).token_ids) == 3
    await engine.stop()


async def test_waiting_for_a_place_is_no_time_of_the_request():
    looks = itertools.count()
    clock = RequestClock(0.1, lambda: Work(tokens_made=next(looks), at_work={"another": 0}))
    queued = asyncio.create_task(wait(clock, "queued"))
    await asyncio.wait([queued], timeout=1.0)
    assert not queued.done(), "it was ended while others were served"
    queued.cancel()
    await asyncio.wait([queued], timeout=DEADLINE_S)
    assert queued.cancelled()


async def test_only_what_has_a_row_is_at_work(tmp_path):
    config = RolloutConfig(model_path=make_tiny_model(tmp_path), max_model_len=256, max_num_seqs=2)
    engine = HfEngine(config)
    await engine.start()
    batch = asyncio.create_task(engine.generate_many([request(str(i), 100) for i in range(12)]))
    seen = set()
    while not batch.done():
        await asyncio.sleep(0.001)
        working = engine._worker.work().at_work
        assert len(working) <= 2
        seen.update(working)
    assert len(seen) > 2, "rows were taken in turn"
    assert (await engine.health()).tokens_made == sum(len(one.token_ids) for one in await batch) == 1200
    await engine.stop()


async def test_a_request_is_timed_by_what_its_row_takes(tmp_path, monkeypatch):
    engine = HfEngine(RolloutConfig(model_path=make_tiny_model(tmp_path), max_model_len=512))
    await engine.start()
    looks, idle = itertools.count(), Work(tokens_made=0, at_work={})

    def look():
        """Tell of the rows that there are, none of which gets a token, and of others that always do."""
        worker = engine._worker
        work = idle if worker is None else worker.work()
        return replace(work, tokens_made=next(looks), at_work=dict.fromkeys(work.at_work, 0))

    monkeypatch.setattr(engine, "_clock", RequestClock(0.02, look))
    with pytest.raises(RequestTimeout, match=r"'late' got no token in 0\.02 s"):
        await engine.generate(request("late", 500))
    monkeypatch.undo()
    assert len((await engine.generate(request("next", 1))).token_ids) == 1
    assert (await engine.health()).ok
    await engine.stop()


async def test_where_nothing_moves_the_engine_is_to_blame():
    made, limit_s = 0, 0.2
    clock = RequestClock(limit_s, lambda: Work(tokens_made=made, at_work={"a": made}))
    waiters = [asyncio.create_task(wait(clock, name)) for name in ("a", "queued")]
    results = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), DEADLINE_S)
    assert [type(error) for error in results] == [EngineStateError] * 2
    assert "no token in 0.2 s (`request_timeout_s`) while 2 requests ran" in str(results[0])


async def test_a_time_out_of_the_caller_s_own_is_passed_on():
    clock = RequestClock(60.0, lambda: Work(tokens_made=0, at_work={}))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await wait(clock, "a")
    with pytest.raises(TimeoutError, match="of the body"):
        async with clock.over(["b"]):
            raise TimeoutError("of the body")


async def wait(clock, name):
    async with clock.over([name]):
        await asyncio.Event().wait()


def test_it_travels_between_processes():
    error = pickle.loads(pickle.dumps(RequestTimeout("late")))
    assert isinstance(error, RequestTimeout)
    assert not isinstance(error, (TimeoutError, EngineStateError)), "a pool takes these for a dead replica"
