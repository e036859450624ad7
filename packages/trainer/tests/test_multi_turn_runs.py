"""Whole runs of several turns in every mode: bounds, kills, replays, failures, metrics."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from offbeat_trainer.config import (
    AsyncConfig,
    EnvironmentConfig,
    LoopConfig,
    Order,
    Partial,
)
from offbeat_trainer.errors import DeadlineExceeded
from offbeat_trainer.loops.events import MemoryJournal
from offbeat_trainer.loops.schedule import Schedule
from offbeat_trainer.rollouts.environment import Feedback
from scripted import ScriptedPool, ScriptedRun

LOOP = LoopConfig(
    steps=5, prompts_per_step=3, group_size=2, validate_every=2, validation_prompts=2, save_every=2, sample_every=1
)  # fmt: skip


class Dice:
    """Rolls dice between the turns, as many as its seed says; odd tokens are what it likes."""

    def reset(self, prompt, seed):
        self.draws = random.Random(seed)
        return []

    def step(self, action):
        odd = sum(token % 2 for token in action.token_ids) / len(action.token_ids)
        rolled = [self.draws.randint(1, 6) for _ in range(self.draws.randint(1, 3))]
        return Feedback(observation=rolled, reward=odd, done=action.turn == 2 or self.draws.random() < 0.2)


def scripted(folder, **settings):
    settings = {
        "mode": "sync",
        "loop": LOOP,
        "environment": Dice,
        "turns": EnvironmentConfig(max_tokens=60),
        **settings,
    }
    return ScriptedRun(folder=folder, **settings)


def pace(seed):
    draws = random.Random(seed)
    return lambda request: draws.uniform(0.001, 0.3)


def test_a_sync_run_learns_from_several_turns(tmp_path):
    run = scripted(tmp_path).go()
    assert run.outcome.steps == LOOP.steps
    for batch in run.policy.batches:
        assert (batch["loss_mask"] == (batch["policy_version"] >= 0)).all()
    values = run.reporter.steps[3]
    assert 1 < values["trajectory/turns_mean"] <= 3
    assert values["trajectory/observed_tokens_mean"] > 0


def test_what_turns_earn_is_learned_from(tmp_path):
    class Three(Dice):
        def step(self, action):
            return replace(super().step(action), done=action.turn == 2)

    many = replace(_longer(LOOP, 30), prompts_per_step=8, group_size=8)
    steps = scripted(tmp_path, environment=Three, loop=many).go().reporter.steps
    assert steps[30]["reward/mean"] > steps[1]["reward/mean"] + 0.08


def _longer(loop, steps):
    return replace(loop, steps=steps, validate_every=0, save_every=0)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("partial", Partial)
def test_no_staleness_is_taking_turns_with_an_environment_too(tmp_path, order, partial):
    sync = scripted(tmp_path / "sync").go()
    mode = AsyncConfig(max_staleness=0, order=order, partial=partial)
    run = scripted(
        tmp_path / "run", mode="fully_async", asynchrony=mode, pool=ScriptedPool(pace=pace(3))
    ).go()
    assert run.policy.history == sync.policy.history
    assert run.history() == sync.history()


@pytest.mark.parametrize("partial", Partial)
@pytest.mark.parametrize("staleness", [1, 3])
def test_no_trained_token_is_older_than_the_bound(tmp_path, partial, staleness):
    mode = AsyncConfig(max_staleness=staleness, partial=partial)
    run = scripted(
        tmp_path, mode="fully_async", asynchrony=mode, pool=ScriptedPool(pace=pace(4)), loop=_longer(LOOP, 20)
    ).go()
    ages = [
        step + 1 - version
        for step, batch in enumerate(run.policy.batches)
        for version in batch["policy_version"][batch["loss_mask"]].tolist()
    ]
    assert max(ages) == staleness


def killed_and_resumed(folder, mode, at):
    """Return a run whose environment never answers its call number `at`, and the one that goes on from there."""
    calls = 0

    class Deadly(Dice):
        def step(self, action):
            nonlocal calls
            calls += 1
            if calls == at:
                raise asyncio.CancelledError  # what is under way ends here and is never heard of again
            return super().step(action)

    journal = MemoryJournal()
    first = scripted(folder, mode=mode, environment=Deadly, journal=journal)
    with pytest.raises(DeadlineExceeded, match="waits for generation"):
        first.go()
    assert first.outcome.steps < LOOP.steps
    return first, scripted(folder, mode=mode, journal=MemoryJournal(journal.events())).go()


@pytest.mark.parametrize("at", [7, 23, 41, 66])
def test_killed_in_the_middle_of_trajectories_a_run_goes_on_as_if_nothing_had_been(tmp_path, at):
    """A half-finished trajectory is begun anew, with the seeds it had: the resumed run repeats the undisturbed one."""
    undisturbed = scripted(tmp_path / "undisturbed").go()
    _, again = killed_and_resumed(tmp_path / "run", "sync", at)
    assert again.policy.history == undisturbed.policy.history
    for step, values in again.history().items():
        assert values == undisturbed.history()[step]


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
@pytest.mark.parametrize("at", [7, 23, 41])
def test_killed_beside_training_every_prompt_is_trained_once_all_the_same(tmp_path, mode, at):
    """What was under way begins anew under the weights that are served then."""
    _, again = killed_and_resumed(tmp_path, mode, at)
    trained = Counter(number for numbers in again.policy.prompts for number in numbers)
    assert trained == dict.fromkeys(range(LOOP.steps * LOOP.prompts_per_step), LOOP.group_size)


def test_a_schedule_is_replayed_where_one_version_made_each_group(tmp_path):
    mode = AsyncConfig(max_staleness=2, partial=Partial.WAIT, order=Order.LONGEST_WAITING)
    run = scripted(
        tmp_path / "one", mode="fully_async", asynchrony=mode, pool=ScriptedPool(pace=pace(5))
    ).go()
    schedule = Schedule.of(run.journal.events())
    other = scripted(
        tmp_path / "other",
        mode="fully_async",
        asynchrony=mode,
        pool=ScriptedPool(pace=pace(9)),
        replay=schedule,
    ).go()
    assert other.policy.history == run.policy.history


def test_an_environment_that_fails_costs_its_group_and_is_counted(tmp_path):
    class Breaks(Dice):
        def reset(self, prompt, seed):
            if prompt.uid in ("1", "5"):
                raise OSError("no such place")
            return super().reset(prompt, seed)

    run = scripted(tmp_path, environment=Breaks).go()
    assert run.outcome.steps == LOOP.steps
    assert run.reporter.steps[LOOP.steps]["buffer/dropped_environment_raised_groups"] == 2
    assert run.outcome.summary()["dropped_groups"] == {"environment_raised": 2}


def test_metrics_say_what_ended_trajectories(tmp_path):
    run = scripted(tmp_path, turns=EnvironmentConfig(max_turns=1, max_tokens=60)).go()
    assert run.reporter.steps[1]["trajectory/out_of_turns_fraction"] > 0
