"""Who is lost and who is only slow; what a loss costs; and replicas that come and go while requests run.

All in virtual time: nothing here is slow because the machine is.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import pytest_asyncio

from offbeat_rollout import (
    EngineReplica,
    GenerateRequest,
    NoReplica,
    PauseMode,
    ReplicaGone,
    ReplicaPool,
    RequestTimeout,
    RolloutConfig,
    SamplingParams,
)
from offbeat_rollout.testing import ScriptedRollout

pytestmark = pytest.mark.usefixtures("virtual_time")

DEADLINE_S = 600.0
LONG = 4000


class Starving(ScriptedRollout):
    """Makes one token of the request `starved` and then none, while others get theirs."""

    def _advance(self, running):
        if running.request.request_id != "starved" or not running.versions:
            super()._advance(running)


class Local(EngineReplica):
    """A scripted engine whose ways to fail are switched on by name: `silent` (works and tells nobody), `told` (its health)."""

    def __init__(self, name, **options):
        config = RolloutConfig(model_path="", max_model_len=2 * LONG, **options)
        super().__init__(name, Starving(config, token_s=0.001))
        self.batches = []
        self.aborted = []
        self.hung = None  # an event: calls wait for it, then fail
        self.tell = lambda health: health

    async def generate_many(self, requests, ended):
        self.batches.append([request.request_id for request in requests])
        if self.hung is not None:
            await self.hung.wait()
            raise ConnectionError(f"{self.name} fell over")
        await super().generate_many(requests, ended)

    async def abort(self, request_ids):
        self.aborted.append(list(request_ids))
        await super().abort(request_ids)

    async def health(self):
        return self.tell(await super().health())


def request(name, max_tokens=5, prompt=(1,)):
    return GenerateRequest(request_id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens))


def batch(count, max_tokens=5, prefix="q"):
    return [request(f"{prefix}{i}", max_tokens, (1 + i,)) for i in range(count)]


def open_pool(replicas, **options):
    pool = ReplicaPool(replicas, **options)
    for replica in replicas:
        pool.admit(replica.name, 0)
    return pool


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 replicas and pools are asked
            await asyncio.sleep(0.005)


@pytest_asyncio.fixture(loop_scope="module")
async def house():
    """Return a way to make replicas; they are stopped in the end."""
    made = []

    async def start(names, **options):
        replicas = [Local(name, **options) for name in names]
        made.extend(replicas)
        for replica in replicas:
            await replica.engine.start()
        return replicas

    yield start
    for replica in made:
        await replica.engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def watched():
    """Return a way to watch a pool; it ends with the test."""
    tasks = []
    yield lambda pool, **options: tasks.append(asyncio.create_task(pool.watch(**options)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_request_that_gets_no_token_costs_nobody_but_itself(house, watched):
    replicas = await house("abc", request_timeout_s=0.5)
    pool = open_pool(replicas, stall_timeout_s=1.0)
    watched(pool, period_s=0.05)
    others = asyncio.create_task(pool.generate_many(batch(6, LONG)))
    with pytest.raises(RequestTimeout, match="'starved' got no token in"):
        await pool.generate(request("starved", LONG))
    assert len(await others) == 6
    assert pool.versions == {"a": 0, "b": 0, "c": 0}
    assert len(await pool.generate_many(batch(6, prefix="after"))) == 6
    assert [["starved"] in replica.batches for replica in replicas].count(True) == 1, (
        "it was not tried elsewhere"
    )


@pytest.mark.parametrize("watching", [True, False])
async def test_a_replica_that_makes_tokens_is_never_dead(house, watched, watching):
    """The request takes many times what a silent replica is allowed."""
    (replica,) = await house("a")
    pool = open_pool([replica], stall_timeout_s=0.3)
    if watching:
        watched(pool, period_s=0.02)
    done = await pool.generate(request("long", 1500))
    assert len(done.token_ids) == 1500
    assert pool.versions == {"a": 0}


@pytest.mark.parametrize("watching", [True, False])
async def test_one_that_makes_none_is_lost_and_its_requests_move(house, watched, watching):
    a, b = await house("ab")
    pool = open_pool([a, b], stall_timeout_s=1.0)
    if watching:
        watched(pool, period_s=0.02)
    a.hung = asyncio.Event()  # its health goes on saying that all is well
    done = await asyncio.wait_for(pool.generate_many(batch(8)), DEADLINE_S)
    assert [one.request_id for one in done] == [f"q{i}" for i in range(8)]
    assert pool.versions == {"b": 0}
    assert "a: out (made no token in" in pool.describe()


@pytest.mark.parametrize("tells", [True, False])
async def test_who_makes_tokens_is_told_of_by_its_health_and_with_each_completion(house, watched, tells):
    seen = []
    (replica,) = await house("a")
    pool = open_pool([replica], stall_timeout_s=1.0, on_progress=seen.append)
    watched(pool, period_s=0.02)
    if not tells:
        replica.tell = lambda health: replace(health, tokens_made=None)
    many = [request(f"q{i}", 20 * (i + 1)) for i in range(60)]  # one ends every few hundredths of a second
    work = asyncio.create_task(pool.generate_many(many))
    await until(lambda: seen)
    assert work.done() is False
    await work
    assert {*seen} == {"a"}
    assert len(seen) > 60 if tells else len(seen) == 60
    seen.clear()
    await asyncio.sleep(1.0)  # it has nothing to do
    assert not seen


async def test_a_pause_is_no_death(house, watched):
    (replica,) = await house("a")
    pool = open_pool([replica], stall_timeout_s=0.2)
    watched(pool, period_s=0.02)
    await replica.engine.pause(PauseMode.KEEP)
    work = asyncio.create_task(pool.generate(request("r")))
    await asyncio.wait([work], timeout=1.0)
    assert not work.done()
    await replica.engine.resume()
    assert len((await asyncio.wait_for(work, DEADLINE_S)).token_ids) == 5
    assert pool.versions == {"a": 0}


async def test_who_does_not_tell_its_progress_is_judged_by_its_completions(house):
    (replica,) = await house("a")
    replica.tell = lambda health: replace(health, tokens_made=None)
    pool = open_pool([replica], stall_timeout_s=1.0)
    many = [request(f"q{i}", 20 * (i + 1)) for i in range(60)]  # one ends every few hundredths of a second
    assert len(await pool.generate_many(many)) == 60
    with pytest.raises(NoReplica, match="made no token in"):
        await pool.generate(request("long", LONG))


async def test_a_deadline_on_the_way_to_a_well_replica_is_not_its_death(house):
    (replica,) = await house("a")
    honest, replica.generate_many = replica.generate_many, late
    pool = open_pool([replica])
    with pytest.raises(RequestTimeout, match="1 requests were not answered in time by 'a', which is well"):
        await pool.generate(request("r"))
    replica.generate_many = honest
    assert len((await pool.generate(request("r"))).token_ids) == 5


async def late(requests, ended):
    raise TimeoutError("the wire has a deadline of its own")


async def test_a_loss_is_noticed_by_calls_that_began_before_a_sync(house, watched):
    a, b = await house("ab")
    pool = open_pool([a, b])
    a.hung = asyncio.Event()
    work = asyncio.create_task(pool.generate_many(batch(8)))
    await until(lambda: a.batches)
    pool.admit("a", 1)  # a sync in between: everybody is admitted anew
    pool.admit("b", 1)
    a.tell = lambda health: replace(health, ok=False, detail="hung")
    watched(pool, period_s=0.02)
    assert len(await asyncio.wait_for(work, DEADLINE_S)) == 8
    assert pool.versions == {"b": 1}
    assert pool.loads == {"a": 0, "b": 0}


async def test_a_late_failure_of_the_old_life_does_not_lose_the_new_one(house):
    a, b = await house("ab")
    heard = []
    pool = open_pool([a, b], on_lost=lambda name, why: heard.append((name, why)))
    hung = a.hung = asyncio.Event()
    slow = asyncio.create_task(pool.generate_many(batch(8)))
    await until(lambda: a.batches)
    pool.lose("a", "its node is gone")
    a.hung = None  # a new process under the old name
    pool.admit("a", 3)
    hung.set()  # and the old one's call fails only now
    assert len(await asyncio.wait_for(slow, DEADLINE_S)) == 8
    assert pool.versions == {"a": 3, "b": 0}
    assert heard == [("a", "its node is gone")]


async def test_what_had_ended_before_a_loss_is_not_made_again(house):
    a, b = await house("ab")
    pool = open_pool([a])
    work = asyncio.create_task(pool.generate_many([request("short", 1), request("long", 300)]))
    await until(lambda: pool.loads["a"] == 301)
    pool.add(b)
    pool.admit("b", 0)
    pool.lose("a", "its node is gone")
    done = await asyncio.wait_for(work, DEADLINE_S)
    assert [(one.request_id, len(one.token_ids)) for one in done] == [("short", 1), ("long", 300)]
    assert b.batches == [["long"]]


async def test_the_load_of_a_request_ends_with_it(house):
    (a,) = await house("a")
    pool = open_pool([a])
    work = asyncio.create_task(pool.generate_many([request("x", 1), request("y", 10), request("z", LONG)]))
    await until(lambda: pool.loads["a"] == LONG + 1)
    await pool.abort(["z"])
    await work
    assert pool.loads == {"a": 0}


async def test_a_batch_cancelled_before_it_began_leaves_no_load(house):
    (a,) = await house("a")
    pool = open_pool([a])
    for steps in range(6):
        work = asyncio.create_task(pool.generate_many(batch(4)))
        for _ in range(steps):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait([work], timeout=DEADLINE_S)
        assert work.cancelled()
        assert pool.loads == {"a": 0}, f"after {steps} steps"
    await pool.remove("a")


async def test_a_slow_abort_is_no_death(house, monkeypatch):
    monkeypatch.setattr("offbeat_rollout.toolkit.pool._ABORT_TIMEOUT_S", 0.05)
    (a,) = await house("a")
    pool = open_pool([a])
    a.abort = lambda request_ids: asyncio.sleep(DEADLINE_S)
    await pool.abort(["nobody"])
    assert pool.versions == {"a": 0}


async def test_replicas_join_and_leave_at_any_moment(house):
    a, b = await house("ab")
    pool = ReplicaPool()
    with pytest.raises(NoReplica, match="the pool is empty"):
        await pool.generate(request("r"))
    pool.add(a)
    with pytest.raises(ValueError, match=r"'a' is here; `remove` it"):
        pool.add(a)
    pool.admit("a", 0)
    work = asyncio.create_task(pool.generate_many(batch(2, max_tokens=300)))
    await until(lambda: a.batches)
    pool.add(b)
    pool.admit("b", 0)
    gone = asyncio.create_task(pool.remove("a"))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="being removed"):
        pool.admit("a", 1)
    await pool.generate(request("new"))
    assert not gone.done(), "it still has work"
    assert b.batches == [["new"]], "no new traffic for who leaves"
    assert [len(one.token_ids) for one in await work] == [300, 300]
    await asyncio.wait_for(gone, DEADLINE_S)
    assert a.batches == [["q0", "q1"]]
    assert pool.loads == {"b": 0}
    pool.add(a)  # it may come back
    pool.admit("a", 5)
    assert pool.versions == {"a": 5, "b": 0}


async def test_what_a_removed_replica_does_can_move(house):
    a, b = await house("ab")
    pool = open_pool([a], max_attempts=1)
    work = asyncio.create_task(pool.generate_many(batch(2, max_tokens=300)))
    await until(lambda: a.batches)
    with pytest.raises(NoReplica, match="nobody to take what 'a' is doing: a: version 0"):
        await pool.remove("a", move=True)
    assert pool.versions == {"a": 0}
    pool.add(b)
    pool.admit("b", 0)
    await asyncio.wait_for(pool.remove("a", move=True), DEADLINE_S)
    assert not work.done()
    assert (await a.health()).num_running == 0, "it was told to stop"
    assert [len(one.token_ids) for one in await work] == [300, 300]
    assert b.batches == [["q0", "q1"]]
    assert pool.loads == {"b": 0}


async def test_one_that_dies_while_it_leaves_is_forgotten_and_not_reported(house):
    a, b = await house("ab")
    heard = []
    pool = open_pool([a, b], on_lost=lambda *what: heard.append(what))
    hung = a.hung = asyncio.Event()
    work = asyncio.create_task(pool.generate_many(batch(8)))
    await until(lambda: a.batches)
    gone = asyncio.create_task(pool.remove("a"))
    await asyncio.sleep(0)
    hung.set()
    await asyncio.wait_for(gone, DEADLINE_S)
    assert len(await work) == 8
    assert (heard, set(pool.loads)) == ([], {"b"})


async def test_a_removal_that_nobody_waits_for_is_finished(house):
    (a,) = await house("a")
    pool = open_pool([a])
    work = asyncio.create_task(pool.generate(request("r", 100)))
    await until(lambda: a.batches)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await pool.remove("a")
    await work
    await until(lambda: pool.loads == {})


async def test_the_last_replica_s_death_is_told(house):
    a, b = await house("ab")
    for replica in (a, b):
        replica.hung = asyncio.Event()
        replica.hung.set()
    pool = open_pool([a, b], max_attempts=2)
    with pytest.raises((ReplicaGone, NoReplica), match="fell over"):
        await pool.generate(request("r"))
    assert pool.versions == {}
    assert pool.loads == {"a": 0, "b": 0}
