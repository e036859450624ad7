from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from offbeat_rollout import (
    EngineReplica,
    EngineStateError,
    Finish,
    GenerateRequest,
    NoReplica,
    PauseMode,
    ReplicaGone,
    ReplicaPool,
    RequestError,
    RolloutConfig,
    SamplingParams,
)
from offbeat_rollout.testing import ScriptedRollout


class Local(EngineReplica):
    """A scripted engine in this process; `served` keeps what it really finished, `error` is raised instead of serving."""

    def __init__(self, name, **options):
        super().__init__(name, ScriptedRollout(RolloutConfig(model_path="", max_model_len=256), **options))
        self.served = []
        self.error = None

    async def generate_many(self, requests, ended):
        if self.error is not None:
            raise self.error

        def note(completion):
            self.served.append(completion.request_id)
            ended(completion)

        await super().generate_many(requests, note)


def batch(count, prefix="q", **sampling):
    return [
        GenerateRequest(
            request_id=f"{prefix}{i}",
            prompt_ids=(1 + i // 4,),
            sampling=SamplingParams(**{"max_tokens": 6, "seed": i, **sampling}),
        )
        for i in range(count)
    ]


@pytest_asyncio.fixture(loop_scope="module")
async def replicas():
    made = [Local(f"replica {i}") for i in range(3)]
    for replica in made:
        await replica.engine.start()
    yield made
    for replica in made:
        await replica.engine.stop()


async def test_a_batch_is_split_and_comes_back_in_order(replicas):
    pool = ReplicaPool(replicas)
    for replica in replicas:
        pool.admit(replica.name, 0)
    requests = batch(48)
    done = await pool.generate_many(requests)
    assert [completion.request_id for completion in done] == [request.request_id for request in requests]
    alone = await replicas[0].engine.generate_many(batch(48, prefix="again"))
    assert [c.token_ids.tolist() for c in done] == [c.token_ids.tolist() for c in alone]
    assert all(8 <= len(replica.served) <= 24 for replica in replicas)
    assert pool.loads == {replica.name: 0 for replica in replicas}
    assert await pool.generate_many([]) == []


async def test_no_traffic_before_admission_and_after_a_fence(replicas):
    pool = ReplicaPool(replicas)
    with pytest.raises(NoReplica, match=r"replica 0: out \(not admitted yet\)"):
        await pool.generate_many(batch(3))
    pool.admit("replica 1", 4)
    await pool.generate_many(batch(9))
    assert [len(replica.served) for replica in replicas] == [0, 9, 0]
    pool.admit("replica 2", 5)
    await pool.generate_many(batch(8), min_version=5)
    assert [len(replica.served) for replica in replicas] == [0, 9, 8]
    pool.fence("replica 2", "its sync failed")
    with pytest.raises(NoReplica, match=r"version 5 or later.*replica 2: out \(its sync failed\)"):
        await pool.generate_many(batch(3), min_version=5)
    with pytest.raises(ValueError, match="no replica 'replica 9'"):
        pool.admit("replica 9", 1)


@pytest.mark.parametrize(
    "error", [ConnectionError("process died"), EngineStateError("engine died"), ReplicaGone("x", "died")]
)
async def test_a_dead_replica_s_requests_go_elsewhere_once(replicas, error):
    pool = ReplicaPool(replicas)
    for replica in replicas:
        pool.admit(replica.name, 0)
    replicas[1].error = error
    done = await pool.generate_many(batch(40))
    assert [completion.request_id for completion in done] == [f"q{i}" for i in range(40)]
    assert sorted(replicas[0].served + replicas[2].served) == sorted(f"q{i}" for i in range(40))
    assert set(pool.versions) == {"replica 0", "replica 2"}
    assert pool.loads["replica 1"] == 0


async def test_a_replica_lost_in_the_middle_is_replaced(replicas):
    pool = ReplicaPool(replicas)
    for replica in replicas:
        pool.admit(replica.name, 0)
    await replicas[1].engine.pause(PauseMode.KEEP)  # it hangs: takes requests and never answers
    work = asyncio.create_task(pool.generate_many(batch(30)))
    await asyncio.sleep(0.1)
    assert not work.done()
    pool.lose("replica 1", "its node is gone")
    done = await asyncio.wait_for(work, 600)
    assert len({completion.request_id for completion in done}) == 30
    assert replicas[1].served == []


async def test_attempts_are_bounded_and_the_end_is_told(replicas):
    for replica in replicas:
        replica.error = ConnectionError(f"{replica.name} fell over")
    pool = ReplicaPool(replicas, max_attempts=2)
    for replica in replicas:
        pool.admit(replica.name, 0)
    with pytest.raises((ReplicaGone, NoReplica), match=r"fell over|not admitted"):
        await pool.generate_many(batch(1))
    assert len(pool.versions) == 1, "two were tried, the third must not be"
    with pytest.raises(NoReplica, match="fell over"):
        await pool.generate_many(batch(1))


async def test_a_bad_request_is_not_the_replica_s_fault(replicas):
    pool = ReplicaPool(replicas)
    for replica in replicas:
        pool.admit(replica.name, 0)
    with pytest.raises(RequestError, match="'q0'"):
        await pool.generate_many(batch(1, temperature=-1.0))
    assert len(pool.versions) == 3
    assert sum(pool.loads.values()) == 0


async def test_cancelling_a_batch_ends_it_on_the_replicas(replicas):
    pool = ReplicaPool(replicas)
    pool.admit("replica 0", 0)
    work = asyncio.create_task(pool.generate_many(batch(4, max_tokens=250)))
    await asyncio.sleep(0.05)
    work.cancel()
    await asyncio.wait([work], timeout=600)
    assert work.cancelled()
    assert (await replicas[0].health()).num_running == 0
    assert pool.loads["replica 0"] == 0


async def test_abort_reaches_the_replica_that_has_the_request(replicas):
    pool = ReplicaPool(replicas)
    for replica in replicas:
        pool.admit(replica.name, 0)
    requests = batch(6, max_tokens=250)
    work = asyncio.create_task(pool.generate_many(requests))
    await asyncio.sleep(0.05)
    await pool.abort(["q0", "q5"])
    done = await asyncio.wait_for(work, 600)
    assert [completion.finish for completion in done] == [Finish.ABORT, *[Finish.LENGTH] * 4, Finish.ABORT]


async def test_the_watch_loses_a_replica_that_is_not_well(replicas):
    pool = ReplicaPool(replicas)
    for replica in replicas:
        pool.admit(replica.name, 3)
    watch = asyncio.create_task(pool.watch(period_s=0.02, timeout_s=60.0))
    await replicas[0].engine.stop()
    while "replica 0" in pool.versions:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    watch.cancel()
    await asyncio.wait([watch], timeout=600)
    assert pool.versions == {"replica 1": 3, "replica 2": 3}
    assert "replica 0: out (not running)" in pool.describe()


async def test_a_request_that_is_aborted_where_its_replica_is_found_dead_is_not_begun_anew(
    replicas, monkeypatch
):
    pool = ReplicaPool(replicas[:2])
    pool.admit("replica 0", 0)
    work = asyncio.create_task(pool.generate_many(batch(3, max_tokens=250)))
    await asyncio.sleep(0.05)

    async def gone(request_ids):
        raise ConnectionError("nobody is there")

    monkeypatch.setattr(replicas[0], "abort", gone)
    pool.admit("replica 1", 0)
    await pool.abort(["q0", "q2", "unknown"])
    done = await asyncio.wait_for(work, 600)
    assert [one.finish for one in done] == [Finish.ABORT, Finish.LENGTH, Finish.ABORT]
    assert replicas[1].served == ["q1"]
    assert sum(pool.loads.values()) == 0
    assert (await pool.generate(batch(1)[0])).finish is Finish.LENGTH, "its id may be used again"
