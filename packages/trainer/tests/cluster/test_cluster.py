"""One real cluster of two ranks and two replicas: weights and calls go through, and every failure has a name.

The tests share the cluster and run in the order they are written: the last ones kill what the first ones use.
"""

import asyncio
import json
import os
import signal
import time
from dataclasses import replace

import pytest

from offbeat_ckptsync import SyncConfig
from offbeat_engine import BatchError
from offbeat_engine.testing import random_batch
from offbeat_rollout import NoReplica, RequestError, RequestTimeout
from offbeat_rollout.toolkit.clock import RequestClock
from offbeat_trainer.config import Placement
from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.errors import DeadlineExceeded, PlanRefused, WorkerGone
from offbeat_trainer.watch.watchdog import GENERATION, Timeline

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEP_TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory, started):
    folder = tmp_path_factory.mktemp("cluster")
    async with started(folder, num_ranks=2, num_replicas=2, sync=SyncConfig(canary=True)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
async def publisher(cluster):
    return cluster.publisher()


async def test_the_ranks_store_listens_on_no_other_interface(cluster):
    """Torch's own listens on all, and gives every key to whoever connects."""

    def address(worker):
        from pathlib import Path

        port = worker._meeting.port
        lines = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        ]
        return [words[1] for words in lines if words[3] == "0A" and words[1].endswith(f":{port:04X}")]

    [found] = await cluster.train._workers[0].__ray_call__.remote(address)
    assert found.startswith("0100007F:")


async def test_devices_are_reserved_beside_the_event_loop(cluster):
    """Where none are free it takes minutes, in which the driver hears Ctrl-C and draws its console."""
    from offbeat_trainer.cluster.placement import PlacementGroups

    def placement(timeout_s):
        spec = cluster._spec
        return PlacementGroups(
            replace(
                spec,
                train=replace(spec.train, device="cuda"),
                cluster=replace(spec.cluster, start_timeout_s=timeout_s, placement=Placement.COLOCATED),
            )
        )

    turns = 0

    async def turning():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    beside = asyncio.create_task(turning())
    with pytest.raises(PlanRefused, match=r"the pool 'shared' needs 2 x .*GPU.*within 2 s"):
        await placement(2.0).reserve("train")
    beside.cancel()
    assert turns > 3
    waiting = placement(STEP_TIMEOUT_S)
    work = asyncio.create_task(waiting.reserve("train"))
    await asyncio.sleep(0.1)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    waiting.release()


async def test_a_replica_serves_nothing_before_its_first_sync(cluster, requests):
    with pytest.raises(NoReplica, match="replica 0: out"):
        await cluster.rollout.generate_many(requests(4))


async def test_the_manager_reads_what_each_serves_and_fences_by_name(cluster, publisher):
    members = cluster.rollout.members
    started = [await member.status() for member in members.values()]
    assert [(one.version, one.label, one.committed) for one in started] == [(0, None, False)] * 2

    report = await publisher.publish(1)  # both canaries agree
    assert sorted(report.members) == ["replica 0", "replica 1"]
    served = {name: await member.status() for name, member in members.items()}
    for status in served.values():
        assert (status.version, status.committed) == (1, True)
        assert status.label.content_digest == report.content_digest
    answers = [await member.canary() for member in members.values()]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 4

    await members["replica 1"].fence("a test says so")
    one, other = [await member.status() for member in members.values()]
    assert (one.committed, other.label, other.committed) == (True, None, False)

    await cluster.train.supervise(random_batch(4))
    await publisher.publish(2)
    again = {name: await member.status() for name, member in members.items()}
    assert {status.version for status in again.values()} == {2}
    assert again["replica 0"] == again["replica 1"]
    assert again["replica 1"].committed


async def test_publish_brings_both_replicas_to_the_version_and_their_tokens_say_so(
    cluster, publisher, requests, complete
):
    report = await publisher.publish(3)
    assert sorted(report.members) == ["replica 0", "replica 1"]
    before = await cluster.rollout.generate_many(requests(8))
    assert {version for one in before for version in one.policy_versions} == {3}
    assert [one.request_id for one in before] == [f"r{index}" for index in range(8)]

    losses = [reduce_metrics(await cluster.train.supervise(random_batch(4)))["train/loss"] for _ in range(3)]
    assert losses[-1] < losses[0]
    await publisher.publish(4)
    after = await cluster.rollout.generate_many(requests(8))
    assert {version for one in after for version in one.policy_versions} == {4}
    assert [one.logprobs.tolist() for one in after] != [one.logprobs.tolist() for one in before]
    # Both replicas, asked one by one, give the same tokens: the weights are the same ones.
    each = [await complete(handle, requests(8)) for handle in cluster.rollout.handles.values()]
    assert each[0] == each[1]
    healths = [await handle.do.remote("health") for handle in cluster.rollout.handles.values()]
    assert [health.version for health in healths] == [4, 4]


async def test_a_request_that_gets_no_token_fails_and_nobody_is_lost(cluster, requests, pid_of):
    rollout = cluster.rollout
    pids = [await pid_of(handle) for handle in rollout.handles.values()]

    def starve(worker, limit_s):
        """Tell the clock of tokens that are of none of the requests."""
        look, clock = worker._engine._work, worker._engine._clock
        worker._engine._clock = RequestClock(
            limit_s, lambda: replace(look(), at_work=dict.fromkeys(look().at_work, 0))
        )
        return clock._limit_s

    before = [await handle.__ray_call__.remote(starve, 0.05) for handle in rollout.handles.values()]
    with pytest.raises(RequestTimeout, match=r"got no token in 0\.05 s in which others got some"):
        await rollout.generate_many(requests(32, max_tokens=1000))
    for handle, limit_s in zip(rollout.handles.values(), before, strict=True):
        await handle.__ray_call__.remote(starve, limit_s)
    assert (rollout.lost, rollout.serving) == ({}, {"replica 0": 4, "replica 1": 4})
    assert [await pid_of(handle) for handle in rollout.handles.values()] == pids
    assert len(await rollout.generate_many(requests(8))) == 8
    assert cluster.watchdog.last[GENERATION].what in {"replica 0 made tokens", "replica 1 made tokens"}


async def test_batches_of_one_turn_travel_together_and_one_that_is_refused_fails_alone(
    cluster, requests, tmp_path
):
    def batch(name, max_tokens=8):
        return [replace(one, request_id=f"{name}/{one.request_id}") for one in requests(6, max_tokens=max_tokens)]  # fmt: skip

    timeline = Timeline(tmp_path / "trace.json")
    for replica in cluster.rollout._replicas.values():
        replica._timeline = timeline
    bad = [replace(one, prompt_ids=()) for one in batch("bad")]
    one, refused, other = await asyncio.gather(
        *map(cluster.rollout.generate_many, (batch("a"), bad, batch("b", max_tokens=40))), return_exceptions=True
    )  # fmt: skip
    timeline.close()
    assert isinstance(refused, RequestError)
    assert [done.request_id for done in one] == [f"a/r{index}" for index in range(6)]
    assert [done.token_ids[:8].tolist() for done in other] == [done.token_ids.tolist() for done in one]
    events = json.loads((tmp_path / "trace.json").read_text())
    sent = [event["args"]["requests"] for event in events if event.get("ph") == "b"]
    assert (len(sent), sum(sent)) == (2, 18)
    assert cluster.rollout.serving == {"replica 0": 4, "replica 1": 4}


async def test_an_error_over_there_comes_back_as_itself_and_says_where(cluster):
    batch = random_batch(4)
    batch["loss_mask"] = batch["loss_mask"].long()
    with pytest.raises(BatchError, match="loss_mask") as caught:
        await cluster.train.supervise(batch)
    assert any("training rank" in note for note in caught.value.__notes__)
    assert "ray" not in str(caught.value)


async def test_a_timeout_over_there_is_not_taken_for_a_missing_answer(cluster):
    def times_out(_):
        raise TimeoutError("the peer over there did not come")

    with pytest.raises(TimeoutError, match="the peer over there did not come") as caught:
        await cluster.train.call("__ray_call__", times_out, what="meet a peer")
    assert not isinstance(caught.value, DeadlineExceeded)


async def test_a_late_answer_names_who_was_waited_for_and_for_what(cluster):
    def dawdle(_):
        time.sleep(2.0)

    with pytest.raises(DeadlineExceeded, match=r"waited 0\.3 s for training rank [01] to take its time"):
        await cluster.train.call("__ray_call__", dawdle, what="take its time", timeout_s=0.3)
    assert reduce_metrics(await cluster.train.supervise(random_batch(4)))["train/loss"] > 0


async def test_work_of_the_ranks_may_take_as_long_as_it_moves(cluster, monkeypatch):
    """A save of twenty minutes, or a long batch, ends no run; work that stands still does, by name."""

    def plant(worker, seconds, moving):
        import time

        from offbeat_trainer.cluster import waits

        def slow(_):
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                # To the look this is code of ours, as that of a role or an engine is.
                exec(
                    compile("time.sleep(0.01)\n" * 200, "slow", "exec"),
                    {"time": time, "__name__": waits.__name__},
                )
            return []

        def stuck(_):
            exec("time.sleep(seconds)", {"time": time, "seconds": seconds, "__name__": waits.__name__})
            return []

        worker.learner.supervise = slow if moving else stuck

    async def planted(seconds, moving):
        await cluster.train.call("__ray_call__", plant, seconds, moving, what="plant")

    monkeypatch.setattr(cluster.watchdog, "timeout_s", 6.0)
    await planted(14.0, True)
    assert await cluster.train.supervise(random_batch(4)) == []
    assert "moved" in cluster.watchdog.last["the training ranks"].what
    monkeypatch.setattr(cluster.watchdog, "timeout_s", 2.0)
    await planted(10.0, False)
    words = (
        r"nothing has moved for 2 s: the driver waits for the training ranks to train on a supervised batch"
    )
    with pytest.raises(DeadlineExceeded, match=words):
        await cluster.train.supervise(random_batch(4))
    await cluster.train.call(
        "__ray_call__", lambda worker: vars(worker.learner).pop("supervise") and None, what="mend"
    )


async def test_requests_of_a_killed_replica_go_to_the_other_one(cluster, publisher, requests, until, pid_of):
    await publisher.publish(5)
    asked = requests(8, max_tokens=500)
    expected = await cluster.rollout.generate_many(asked)
    doomed = cluster.rollout.handles["replica 1"]
    pid = await pid_of(doomed)
    work = asyncio.create_task(cluster.rollout.generate_many(asked))

    async def busy():
        nonlocal work
        if work.done():  # the batch was over before anybody looked
            work = asyncio.create_task(cluster.rollout.generate_many(asked))
        return (await doomed.do.remote("health")).num_running > 0

    await until(busy, "replica 1 to be at work")
    os.kill(pid, signal.SIGKILL)
    completions = await asyncio.wait_for(work, STEP_TIMEOUT_S)
    # Each completion has a seed of its own, so it is the same wherever it is made.
    assert [one.token_ids.tolist() for one in completions] == [one.token_ids.tolist() for one in expected]
    assert [one.request_id for one in completions] == [one.request_id for one in asked]


async def test_a_killed_rank_is_named_well_before_the_deadline(cluster, pid_of):
    pid = await pid_of(cluster.train._workers[1])

    async def train_for_ever():
        while True:
            await cluster.train.supervise(random_batch(4))

    work = asyncio.create_task(train_for_ever())
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerGone, match="training rank 1 died while it should train on a supervised batch"):
        await asyncio.wait_for(work, STEP_TIMEOUT_S / 2)


async def test_stop_is_safe_to_call_twice_and_with_dead_members(cluster):
    await cluster.stop()
    await cluster.stop()
