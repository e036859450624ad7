"""Training and generation on the same devices, in turns: a real cluster of one rank and one replica on this CPU."""

import asyncio
import os
import signal

import pytest

from offbeat_ckptsync import SyncConfig
from offbeat_engine.testing import random_batch
from offbeat_rollout import GenerateRequest, SamplingParams
from offbeat_trainer.config import Placement

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TIMEOUT_S = 600.0
LONG = 900  # tokens


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory, started):
    folder = tmp_path_factory.mktemp("colocated")
    async with started(
        folder,
        max_tokens=LONG,
        sync=SyncConfig(transport="auto"),
        own_cores=True,
        placement=Placement.COLOCATED,
        health_period_s=0.5,
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def publisher(cluster):
    return cluster.publisher()


async def tokens_made(cluster):
    """Return how many tokens the replica has made of what it has under way."""

    def count(worker):
        batch = worker._engine._worker._batch
        return sum(len(row.token_ids) + len(batch._steps) for row in batch.rows)

    return await cluster.rollout.handles["replica 0"].__ray_call__.remote(count)


async def test_both_pools_sit_in_one_room(cluster):
    from ray.util import placement_group_table

    placement = [room for room in placement_group_table().values() if room["state"] == "CREATED"]
    assert [(room["name"], len(room["bundles"])) for room in placement] == [("shared", 1)]


async def test_both_compute_with_the_cores_that_ray_counts_on_their_machine(cluster):
    import ray

    def threads(worker):
        import torch

        return torch.get_num_threads()

    there = int(ray.cluster_resources()["CPU"])
    assert await cluster.train._workers[0].__ray_call__.remote(threads) == there
    replica = cluster.rollout.handles["replica 0"]
    assert await replica.__ray_call__.remote(lambda worker: worker._engine.config.cpu_threads) == there


async def test_nothing_is_generated_while_weights_change_and_it_goes_on_with_the_next_version(
    cluster, publisher, until
):
    await publisher.publish(1)
    prompt = GenerateRequest(
        request_id="long", prompt_ids=(1, 3), sampling=SamplingParams(max_tokens=LONG, seed=1)
    )
    work = asyncio.create_task(cluster.rollout.generate_many([prompt]))

    async def at_work():
        assert not work.done(), "the completion was over before anything could be trained"
        return await tokens_made(cluster) > 10

    await until(at_work, "the replica to be at work")
    await cluster.train.supervise(random_batch(4))
    made = await tokens_made(cluster)
    assert 10 < made < LONG
    await cluster.train.supervise(random_batch(4))
    await asyncio.sleep(0.3)
    assert await tokens_made(cluster) == made, "the replica generated while the devices were the trainer's"
    report = await publisher.publish(3)
    assert report.transport == "shm", report.why
    (done,) = await asyncio.wait_for(work, TIMEOUT_S)
    versions = list(done.policy_versions)  # it may end before its limit, at an end token
    assert len(versions) > made
    assert versions == [1] * made + [3] * (len(versions) - made)


async def test_a_replacement_rests_too_until_a_sync_wakes_it(cluster, publisher, until, pid_of):
    handle = cluster.rollout.handles["replica 0"]
    os.kill(await pid_of(handle), signal.SIGKILL)

    async def back():
        return cluster.rollout.handles["replica 0"] is not handle and bool(cluster.rollout.serving)

    await publisher.publish(4)
    await until(back, "the replacement to serve")
    assert cluster.rollout.serving == {"replica 0": 4}
    request = GenerateRequest(
        request_id="next", prompt_ids=(1, 3), sampling=SamplingParams(max_tokens=4, seed=1)
    )
    (made,) = await cluster.rollout.generate_many([request])
    assert set(made.policy_versions) == {4}
