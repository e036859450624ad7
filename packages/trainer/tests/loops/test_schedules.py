"""Two hundred random schedules on a virtual clock: the staleness bound, and an account of every prompt.

The checks look at what was trained, and know nothing of gate and buffer.
"""

import random
from collections import Counter

import pytest

from offbeat_rollout import EngineStateError, NoReplica, RequestError
from offbeat_trainer.config import AsyncConfig, LoopConfig, Order, Partial
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.loops.buffer import StalenessGate
from offbeat_trainer.loops.events import Dropped, Finished, Issued, Taken
from offbeat_trainer.loops.online import GroupStream
from scripted import ScriptedPool, ScriptedRun

NUM_SCHEDULES = 200


def random_mode(draws):
    staleness = draws.choice([0, 1, 1, 2, 3, 5])
    order = draws.choice([Order.OLDEST_VERSION, Order.LONGEST_WAITING, Order.FIRST_IN])
    return AsyncConfig(
        max_staleness=staleness,
        sync_every=draws.randint(1, staleness + 1),
        partial=draws.choice([Partial.KEEP, Partial.ABORT, Partial.WAIT]),
        order=order,
        over_sampling=draws.choice([0.0, 0.0, 0.5]),
        max_attempts=draws.randint(1, 3),
    )


def random_run(folder, seed, **overrides):
    """A run of a few steps whose every duration, and some of whose failures, are drawn from `seed`."""
    draws = random.Random(seed)
    mode = random_mode(draws)
    slowest, mishaps = draws.choice([0.01, 0.3, 3.0]), draws.choice([0.0, 0.0, 0.1])

    def pace(request):
        return draws.uniform(0.001, slowest) if draws.random() < 0.9 else 5 * slowest

    def mishap(request, attempt):
        errors = (EngineStateError("lost"), NoReplica("none"), RequestError("too long"), TimeoutError("late"))
        trained = len(request.prompt_ids) < 60 and request.sampling.temperature > 0
        return draws.choice(errors) if trained and draws.random() < mishaps else None

    loop = LoopConfig(
        steps=draws.randint(3, 7), prompts_per_step=draws.randint(1, 4), group_size=draws.randint(1, 2),
        validate_every=draws.choice([0, 3]), validation_prompts=1, save_every=draws.choice([0, 0, 0, 2]), sample_every=0,
    )  # fmt: skip
    return ScriptedRun(
        folder=folder,
        loop=loop,
        asynchrony=overrides.get("mode", mode),
        pool=ScriptedPool(pace, mishap),
        train_s=lambda step: draws.uniform(0.0, 2.0),
        sync_s=draws.uniform(0.001, draws.choice([0.5, 4.0])),
        max_tokens=draws.randint(1, 8),
    )


def check_bound(run):
    """No trained token is more than `max_staleness` versions old."""
    for step, batch in enumerate(run.policy.batches):
        versions = batch["policy_version"][batch["loss_mask"]].tolist()
        if versions:
            assert step + 1 - min(versions) <= run.asynchrony.max_staleness, f"in step {step}"


def check_account(run):
    """Every prompt that was begun is trained once, pending, or dropped with a reason; a step is made of whole groups."""
    events = run.journal.events()
    forgotten = [
        index for event in events if isinstance(event, Taken) and event.begun for index in event.indices
    ]
    dropped = [event.index for event in events if isinstance(event, Dropped)]
    trained = [number for numbers in run.policy.prompts for number in numbers]
    there = [event.index for event in events if isinstance(event, Issued)]
    issued = [*forgotten, *there, *(set(dropped) - set(there))]
    assert sorted(issued) == list(range(len(issued))), (
        "the data is begun in order, nothing twice and nothing skipped"
    )
    assert set(Counter(trained).values()) == {run.loop.group_size}, "whole groups, each once"
    assert len(trained) == run.loop.steps * run.loop.prompts_per_step * run.loop.group_size
    assert len(set(dropped)) == len(dropped)
    assert not set(dropped) & set(trained)
    assert set(dropped) | set(trained) <= set(issued)
    end = run.reporter.steps[run.loop.steps]
    pending = set(issued) - set(dropped) - set(trained)
    assert end["buffer/ready_groups"] + end["buffer/running_groups"] <= len(pending) + len(dropped)
    for event in events:
        if isinstance(event, Finished):
            assert len(event.scores) == run.loop.group_size
            assert len(event.trajectories) in (0, run.loop.group_size), (
                "scores are of completions; old ones forgotten"
            )
            assert all(one.num_tokens for one in event.trajectories)
    paced = not run.asynchrony.over_sampling
    reasons = {event.reason for event in events if isinstance(event, Dropped)}
    assert reasons <= ({"failed", "refused"} if paced else {"failed", "refused", "outpaced"})


def check(folder, seeds, **overrides):
    for seed in seeds:
        run = random_run(folder / str(seed), seed, **overrides)
        try:
            run.go()
        except TrainerError as error:
            if "groups in a row could not be generated" not in str(error):  # mishaps can be that many
                raise AssertionError(f"seed {seed}") from error
            continue
        check_bound(run)
        check_account(run)


def test_random_schedules_keep_the_bound_and_lose_nothing(tmp_path):
    check(tmp_path, range(NUM_SCHEDULES))


def test_a_gate_that_is_weaker_by_one_is_found_out(tmp_path, monkeypatch):
    right = StalenessGate.last_step
    monkeypatch.setattr(StalenessGate, "last_step", lambda self, version: right(self, version) + 1)
    monkeypatch.setattr(GroupStream, "_check", lambda self, step, groups: None)
    with pytest.raises(AssertionError, match="in step"):
        check(tmp_path, range(NUM_SCHEDULES))


def test_a_weaker_gate_is_also_stopped_before_it_trains(tmp_path, monkeypatch):
    right = StalenessGate.last_step
    monkeypatch.setattr(StalenessGate, "last_step", lambda self, version: right(self, version) + 1)
    with pytest.raises(AssertionError, match="seed") as caught:
        check(tmp_path, range(NUM_SCHEDULES))
    assert "versions old; max_staleness is" in str(caught.value.__cause__)


def test_letting_one_group_too_many_in_is_found_out(tmp_path, monkeypatch):
    right = StalenessGate.room

    def one_more(self, step, served, outstanding, replaced):
        return right(self, step, served, outstanding - 1, replaced)

    monkeypatch.setattr(StalenessGate, "room", one_more)
    with pytest.raises(AssertionError, match="seed") as caught:
        check(tmp_path, range(NUM_SCHEDULES))
    assert "max_staleness" in str(caught.value.__cause__)


def test_the_count_alone_is_not_enough(tmp_path, monkeypatch):
    """The rule that is published (pace by the number of groups begun) lets a straggler grow too old."""
    monkeypatch.setattr(StalenessGate, "due", lambda self, step, outstanding: {})
    with pytest.raises(AssertionError, match="seed") as caught:
        check(tmp_path, range(NUM_SCHEDULES))
    assert "can no longer be trained within max_staleness" in str(caught.value.__cause__)
