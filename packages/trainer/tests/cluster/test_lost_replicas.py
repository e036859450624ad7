"""Processes that die or hang in the middle of things, for real: without a replica the run goes on, without a rank it ends."""

import asyncio
import json
import os
import signal
import threading
from dataclasses import replace
from functools import partial

import pytest

from offbeat_engine.testing import random_batch
from offbeat_trainer import Grpo, GrpoConfig
from offbeat_trainer.config import AsyncConfig, LoopConfig, RewardConfig, SamplingConfig
from offbeat_trainer.errors import WorkerGone
from offbeat_trainer.loops.events import Dropped, Issued, MemoryJournal, Taken
from offbeat_trainer.loops.online import run_fully_async
from offbeat_trainer.loops.outcome import Outcome
from offbeat_trainer.loops.run_store import RunStore
from offbeat_trainer.loops.schedule import Schedule
from offbeat_trainer.loops.session import Session
from offbeat_trainer.rollouts.scorer import TaskScorer
from offbeat_trainer.rollouts.single import GroupGenerator, SingleTurn
from offbeat_trainer.watch.watchdog import Timeline
from scripted import Recorder, ScriptedTask

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TIMEOUT_S = 600.0
STEPS = 6
GROUPS = 3  # a step
GROUP_SIZE = 2
COMPLETION_TOKENS = 250


@pytest.fixture
def lively(started):
    """Return a way to start a cluster that misses a dead or silent replica soon."""
    return partial(
        started,
        max_tokens=COMPLETION_TOKENS,
        health_period_s=0.5,
        health_timeout_s=20.0,
        start_timeout_s=TIMEOUT_S,
    )


def parts_of(cluster, folder, recorder, journal):
    return Session(
        task=ScriptedTask(),
        policy=cluster.train,
        rollout=SingleTurn(
            GroupGenerator(cluster.rollout.generate_many, cluster.rollout.abort),
            TaskScorer(ScriptedTask().score, RewardConfig()),
        ),
        publisher=cluster.publisher(),
        reporter=recorder,
        store=RunStore(folder / "state", keep=2),
        seed=3,
        loop=LoopConfig(
            steps=STEPS,
            prompts_per_step=GROUPS,
            group_size=GROUP_SIZE,
            validation_prompts=1,
            step_timeout_s=TIMEOUT_S,
            save_every=1,
        ),
        algorithm=Grpo(config=GrpoConfig()),
        sampling=SamplingConfig(max_tokens=COMPLETION_TOKENS),
        asynchrony=AsyncConfig(max_staleness=2),
        journal=journal,
        timeline=cluster.timeline,
    )


def check_account(journal):
    """Every group that was begun was finished whole by replicas and trained once; none was made up, none dropped."""
    events = list(journal.events())
    schedule = Schedule.of(events)
    taken = [index for event in events if isinstance(event, Taken) for index in event.indices]
    issued = {event.index for event in events if isinstance(event, Issued)}
    assert issued <= set(taken)
    assert sorted(taken) == sorted(schedule.begun) == list(range(STEPS * GROUPS))
    assert not [event for event in events if isinstance(event, Dropped)]
    # They are forgotten with the last checkpoint; who made how many of their tokens stays.
    assert {len(schedule.spans[index]) for index in taken} == {GROUP_SIZE}
    assert all(count for index in taken for spans in schedule.spans[index] for _, count in spans)
    assert all(spans for index in taken for spans in schedule.spans[index])


@pytest.mark.parametrize("num_replicas", [pytest.param(2, marks=pytest.mark.deep), 1])
async def test_a_run_survives_the_death_of_a_replica(tmp_path, num_replicas, lively, requests, until, pid_of):
    timeline = Timeline(tmp_path / "trace.json")
    async with lively(tmp_path, num_replicas=num_replicas, timeline=timeline) as cluster:
        recorder, journal = Recorder(), MemoryJournal()
        parts = parts_of(cluster, tmp_path, recorder, journal)
        run = asyncio.create_task(run_fully_async(parts, Outcome()))
        await until(lambda: run.done() or len(recorder.steps) >= 2, "two steps")
        assert not run.done(), "the run was over before the replica could be killed"
        doomed = cluster.rollout.handles["replica 0"]
        os.kill(await pid_of(doomed), signal.SIGKILL)
        await asyncio.wait_for(run, TIMEOUT_S)
        assert sorted(recorder.steps) == list(range(1, STEPS + 1))
        assert recorder.steps[1]["generation/lost_replicas"] == 0
        if num_replicas == 1:  # with another one, the run may be over before the loss is seen
            assert recorder.steps[STEPS]["generation/lost_replicas"] == 1
        check_account(journal)
        await until(lambda: len(cluster.rollout.serving) == num_replicas, "the replacement to serve")
        assert cluster.rollout.handles["replica 0"] is not doomed
        assert set(cluster.rollout.serving.values()) == {STEPS + 1}
        made = await cluster.rollout.generate_many(requests(8))
        assert {version for one in made for version in one.policy_versions} == {STEPS + 1}
        timeline.close()
        drawn = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())}
        assert {"complete", "paused", "start anew"} <= drawn
        assert any(str(name).startswith("lost: ") for name in drawn)


def asked_of(train):
    """Return a list to which every call to the training ranks is added from now on, by its method and first argument."""
    asked = []

    def noted(call):
        async def noting(method, *arguments, **settings):
            asked.append((method, *arguments[:1]))
            return await call(method, *arguments, **settings)

        return noting

    train.call, train.control = noted(train.call), noted(train.control)
    return asked


@pytest.mark.deep
async def test_syncs_and_requests_go_on_whatever_happens_to_replicas(
    tmp_path, lively, requests, complete, until, pid_of
):
    async with lively(tmp_path, num_replicas=2) as cluster:
        rollout, publisher = cluster.rollout, cluster.publisher()
        await publisher.publish(1)
        os.kill(await pid_of(rollout.handles["replica 1"]), signal.SIGKILL)
        # Nobody has noticed: the sync itself meets the dead member, and goes on with the other.
        assert list((await publisher.publish(2)).members) == ["replica 0"]
        await until(
            lambda: rollout.serving == {"replica 0": 2, "replica 1": 2}, "the replacement to catch up"
        )
        each = [await complete(handle, requests(4)) for handle in rollout.handles.values()]
        assert each[0] == each[1]

        # One that hangs is found by its silence and replaced; its devices are free. The other gives it its weights: the
        # training ranks are asked for nothing but whether they live.
        asked = asked_of(cluster.train)
        os.kill(await pid_of(rollout.handles["replica 1"]), signal.SIGSTOP)
        await until(lambda: "replica 1" in rollout.lost, "the silence to be noticed")
        await until(
            lambda: rollout.serving == {"replica 0": 2, "replica 1": 2}, "the replacement to catch up"
        )

        each = [await complete(handle, requests(4)) for handle in rollout.handles.values()]
        assert each[0] == each[1]
        assert asked == []

        # Training is a step ahead of what is served, and nobody is left to serve: the weights of now, by their name.
        await cluster.train.supervise(random_batch(4))
        for handle in list(rollout.handles.values()):
            os.kill(await pid_of(handle), signal.SIGKILL)
        made = await asyncio.wait_for(rollout.generate_many(requests(4)), TIMEOUT_S)
        assert {version for one in made for version in one.policy_versions} == {3}
        assert (await publisher.publish(3)).version == 3
        await cluster.train.supervise(random_batch(4))
        await publisher.publish(4)
        await until(lambda: rollout.serving == {"replica 0": 4, "replica 1": 4}, "both to serve")


class SlowReward(ScriptedTask):
    """Scores nothing of the second step before it is told to: the trainer waits, and asks nothing of its ranks."""

    def __init__(self):
        super().__init__()
        self.scored = 0
        self.asked, self.told = threading.Event(), threading.Event()

    def score(self, prompt, completion):
        self.scored += 1
        if self.scored > GROUPS * GROUP_SIZE + 1:  # those of the first step, and the validation before it
            self.asked.set()
            self.told.wait(TIMEOUT_S)
        return super().score(prompt, completion)


@pytest.fixture
def slow_reward():
    task = SlowReward()
    yield task
    task.told.set()


@pytest.mark.deep
async def test_a_rank_that_dies_while_the_trainer_waits_for_groups_ends_the_run_by_name(
    tmp_path, lively, slow_reward, until, pid_of
):
    async with lively(tmp_path) as cluster:
        recorder = Recorder()
        parts = parts_of(cluster, tmp_path, recorder, MemoryJournal())
        slow = TaskScorer(slow_reward.score, RewardConfig(timeout_s=TIMEOUT_S))
        parts = replace(
            parts, rollout=SingleTurn(parts.rollout.generator, slow), asynchrony=AsyncConfig(max_staleness=0)
        )
        outcome = Outcome()
        run = asyncio.create_task(cluster.train.watched(run_fully_async(parts, outcome)))
        await until(
            lambda: run.done() or (slow_reward.asked.is_set() and len(recorder.steps) == 1), "the wait"
        )
        assert not run.done(), "the run was over before the rank could be killed"
        os.kill(await pid_of(cluster.train._workers[0]), signal.SIGKILL)
        with pytest.raises(
            WorkerGone, match="training rank 0 died while it should be there for the next call"
        ):
            await asyncio.wait_for(
                asyncio.shield(run), TIMEOUT_S / 2
            )  # the deadlines of the run are TIMEOUT_S
        assert outcome.steps == 1
        assert RunStore(tmp_path / "state", keep=2).load(1).step == 1, "there is a checkpoint to go on from"
