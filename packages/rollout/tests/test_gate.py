"""Requests that wait in the pool: in turn, abortable, and for whoever has room first."""

from __future__ import annotations

import asyncio
import time

import pytest
import pytest_asyncio

from offbeat_rollout import (
    EngineReplica,
    Finish,
    GenerateRequest,
    NoReplica,
    PauseMode,
    ReplicaGone,
    ReplicaPool,
    RolloutConfig,
    SamplingParams,
)
from offbeat_rollout.testing import ScriptedRollout
from offbeat_rollout.toolkit.routing import Gate

DEADLINE_S = 600.0


class Local(EngineReplica):
    """A scripted engine that notes what it was asked, and the most it had at once."""

    def __init__(self, name):
        super().__init__(name, ScriptedRollout(RolloutConfig(model_path=""), token_s=0.001))
        self.asked = []
        self.running = self.most = self.calls = 0

    async def generate_many(self, requests, ended):
        def note(completion):
            self.running -= 1
            ended(completion)

        self.calls += 1
        self.asked += [request.request_id for request in requests]
        self.running += len(requests)
        self.most = max(self.most, self.running)
        await super().generate_many(requests, note)


def batch(count, max_tokens=5, prefix="q"):
    return [
        GenerateRequest(
            request_id=f"{prefix}{i}",
            prompt_ids=(1 + i % 90,),
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        for i in range(count)
    ]


async def until(condition):
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.002)


@pytest_asyncio.fixture(loop_scope="module")
async def replicas():
    made = [Local(name) for name in "ab"]
    for replica in made:
        await replica.engine.start()
    yield made
    for replica in made:
        await replica.engine.stop()


async def test_a_pool_gives_away_no_more_than_it_may(replicas):
    pool = ReplicaPool(replicas, max_running=8)
    for name in "ab":
        pool.admit(name, 0)
    done = await asyncio.wait_for(pool.generate_many(batch(100)), DEADLINE_S)
    assert [one.request_id for one in done] == [f"q{i}" for i in range(100)]
    assert sorted(replicas[0].asked + replicas[1].asked) == sorted(f"q{i}" for i in range(100))
    assert 8 <= replicas[0].most + replicas[1].most <= 24
    assert pool.loads == {"a": 0, "b": 0}


async def test_one_that_joins_in_the_middle_takes_what_waits(replicas):
    a, b = replicas
    pool = ReplicaPool([a], max_running=2)
    pool.admit("a", 0)
    work = asyncio.create_task(pool.generate_many(batch(40, max_tokens=20)))
    await until(lambda: a.asked)
    pool.add(b)
    pool.admit("b", 0)
    assert len(await asyncio.wait_for(work, DEADLINE_S)) == 40
    assert len(b.asked) >= 10


async def test_one_that_stands_still_holds_up_only_what_it_has(replicas):
    a, b = replicas
    pool = ReplicaPool(replicas, max_running=4)
    for name in "ab":
        pool.admit(name, 0)
    await a.engine.pause(PauseMode.KEEP)
    work = asyncio.create_task(pool.generate_many(batch(40)))
    await until(lambda: len(b.asked) >= 32)
    assert len(a.asked) <= 8
    assert not work.done()
    await a.engine.resume()
    assert len(await asyncio.wait_for(work, DEADLINE_S)) == 40


async def test_what_waits_can_be_aborted_and_is_never_sent(replicas):
    a, _ = replicas
    pool = ReplicaPool([a], max_running=1)
    pool.admit("a", 0)
    work = asyncio.create_task(pool.generate_many(batch(3, max_tokens=300)))
    await until(lambda: a.asked)
    await pool.abort(["q0", "q1", "q2", "nobody"])
    done = await asyncio.wait_for(work, DEADLINE_S)
    assert [(one.request_id, one.finish) for one in done] == [(f"q{i}", Finish.ABORT) for i in range(3)]
    assert [one.num_tokens for one in done][1:] == [0, 0]
    assert a.asked == ["q0"]


async def test_those_who_wait_learn_that_nobody_is_left(replicas):
    a, _ = replicas
    pool = ReplicaPool([a], max_running=1)
    pool.admit("a", 0)
    work = asyncio.create_task(pool.generate_many(batch(5, max_tokens=300)))
    await until(lambda: a.asked)
    pool.lose("a", "its node is gone")
    with pytest.raises((NoReplica, ReplicaGone), match="its node is gone"):
        await asyncio.wait_for(work, DEADLINE_S)
    pool.admit("a", 1)
    assert len(await asyncio.wait_for(pool.generate_many(batch(5)), DEADLINE_S)) == 5


async def test_a_batch_that_is_given_up_leaves_its_room_to_others(replicas):
    a, _ = replicas
    pool = ReplicaPool([a], max_running=2)
    pool.admit("a", 0)
    for steps in range(8):
        work = asyncio.create_task(pool.generate_many(batch(6, max_tokens=50)))
        for _ in range(steps):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait([work], timeout=DEADLINE_S)
        assert work.cancelled()
    assert len(await asyncio.wait_for(pool.generate_many(batch(6)), DEADLINE_S)) == 6
    assert pool.loads == {"a": 0}


async def test_first_come_first_served_and_in_pieces_worth_a_call():
    room = 16
    gate = Gate(lambda: room)
    order = []

    async def go(name, count):
        with gate.line_up(batch(count), pytest.fail) as place:
            while entered := await gate.enter(place):
                order.append((name, len(entered)))

    await go("house", 16)
    first, second = asyncio.create_task(go("first", 3)), asyncio.create_task(go("second", 4))
    gate.leave()
    await asyncio.sleep(0.01)
    assert order == [("house", 16)], "one place is no piece"
    gate.leave()
    await asyncio.sleep(0.01)
    assert order[1:] == [("first", 2)]
    gate.leave()
    await asyncio.wait_for(first, DEADLINE_S)
    assert order[2:] == [("first", 1)], "what is left may be less than a piece"
    room = None
    gate.look_again()
    await asyncio.wait_for(second, DEADLINE_S)
    assert order[3:] == [("second", 4)]
    gate.leave(16 + 7 - 3)


async def test_an_empty_house_lets_everybody_see_for_himself():
    gate = Gate(lambda: 0)
    with gate.line_up(batch(5), pytest.fail) as place:
        assert len(await gate.enter(place)) == 5
        assert await gate.enter(place) == []
