"""A step's batch is made beside the event loop."""

import asyncio
import threading
from types import SimpleNamespace

import torch

from offbeat_rollout import Completion, Finish
from offbeat_trainer import Group, Prompt, Trajectory
from offbeat_trainer.loops.learning import learn
from offbeat_trainer.testing import Recorder
from offbeat_trainer.watch.phases import PhaseClock
from offbeat_trainer.watch.timeline import Timeline
from offbeat_trainer.watch.watchdog import Watchdog


async def test_the_event_loop_goes_on_while_the_batch_is_made():
    went_on, made = threading.Event(), []

    class Algorithm:
        def targets(self, groups):
            assert went_on.wait(60), "the event loop waits for the batch"
            return {"advantages": torch.ones(1)}

    class Policy:
        async def update(self, batch):
            made.append(batch)
            return []

    parts = SimpleNamespace(algorithm=Algorithm(), policy=Policy(), sampling=SimpleNamespace(temperature=1.0))
    completion = Completion.of(
        request_id="r", token_ids=[5, 6], logprobs=[-1.0, -2.0], policy_versions=[1, 1], finish=Finish.STOP
    )
    prompt = Prompt(uid="p", text="q", token_ids=(1,), data={})
    groups = [Group(prompt=prompt, trajectories=(Trajectory.of(completion),))]
    asyncio.get_running_loop().call_later(0.01, went_on.set)
    clock = PhaseClock(Recorder(), Timeline(), Watchdog())
    assert await learn(parts, clock, groups) == (groups, [])
    assert made[0]["input_ids"].tolist() == [[1, 5, 6]]
