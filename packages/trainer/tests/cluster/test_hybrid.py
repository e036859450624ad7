"""Two training ranks and two replicas on the same devices: each rank hands what it gathered to the replica beside it."""

import os
import signal

import pytest

from offbeat_ckptsync import SyncConfig, SyncFailed
from offbeat_engine.testing import random_batch
from offbeat_rollout import GenerateRequest, SamplingParams
from offbeat_trainer.config import Placement
from offbeat_trainer.errors import WorkerGone

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TIMEOUT_S = 600.0
REPLICAS = ("replica 0", "replica 1")


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory, started):
    async with started(
        tmp_path_factory.mktemp("hybrid"),
        num_ranks=2,
        num_replicas=2,
        sync=SyncConfig(transport="auto"),
        placement=Placement.COLOCATED,
        health_period_s=0.5,
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def publisher(cluster):
    return cluster.publisher()


async def holders(cluster):
    """Return who holds memory of each training rank: the replicas that serve from it."""

    def of_rank(worker):
        shm = worker._sender._transport._made["shm", "cpu"]
        leases = [lease for segment in shm._segments for lease in segment.leases if lease.line.is_open()]
        return sorted({f"{lease.rank_id} (version {lease.version})" for lease in leases})

    return [await worker.__ray_call__.remote(of_rank) for worker in cluster.train._workers]


async def served(cluster):
    """Return the version and content that each replica serves, committed."""
    answers = [await handle.sync_op.remote("status", {}) for handle in cluster.rollout.handles.values()]
    statuses = [answer["ok"]["status"] for answer in answers]
    assert all(status["committed"] for status in statuses)
    return [(status["version"], status["label"]["content_digest"]) for status in statuses]


async def completions(cluster, complete):
    request = GenerateRequest(
        request_id="same", prompt_ids=(1, 3), sampling=SamplingParams(max_tokens=8, temperature=0.0)
    )
    made = [(await complete(handle, [request]))[0] for handle in cluster.rollout.handles.values()]
    return [(one.token_ids.tolist(), one.logprobs.tolist()) for one in made]


async def test_each_rank_sends_to_its_own_replica_only_and_all_serve_the_same(cluster, publisher, complete):
    seen = []
    for version in (1, 2, 3):
        report = await publisher.publish(version)
        assert report.why.endswith("rank 0 to replica 0/0; rank 1 to replica 1/0"), report.why
        assert report.transport == "shm"
        for rank, who in enumerate(await holders(cluster)):
            assert who, "a replica on a CPU serves from where its weights lie"
            assert all(f"of replica {rank}/0 " in one for one in who), who
        assert await served(cluster) == [(version, report.content_digest)] * 2
        one, other = await completions(cluster, complete)
        assert one == other
        seen.append(one)
        await cluster.train.supervise(random_batch(4))
    assert seen[0] != seen[1] != seen[2], "the weights that are compared changed between the syncs"


async def test_a_replacement_gets_its_weights_from_the_rank_beside_it(cluster, publisher, until, pid_of):
    handle = cluster.rollout.handles["replica 1"]
    os.kill(await pid_of(handle), signal.SIGKILL)

    async def back():
        return cluster.rollout.handles["replica 1"] is not handle and len(cluster.rollout.serving) == 2

    report = await publisher.publish(4)
    await until(back, "the replacement to serve")
    assert await served(cluster) == [(4, report.content_digest)] * 2
    assert all("of replica 1/0 (version 4)" in who for who in (await holders(cluster))[1])


async def test_a_rank_that_dies_while_it_sends_leaves_all_replicas_on_the_old_version(cluster, publisher):
    before = await served(cluster)
    await cluster.train.supervise(random_batch(4))

    def die_in_the_next_pass(worker):
        engine = worker.learner.policy
        gather = engine.named_weights_on

        def dying(ranks):
            for number, named in enumerate(gather(ranks)):
                if number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield named

        engine.named_weights_on = dying

    await cluster.train._workers[1].__ray_call__.remote(die_in_the_next_pass)
    with pytest.raises((SyncFailed, WorkerGone), match=r"training rank 1 died|source"):
        await publisher.publish(5)
    assert await served(cluster) == before
