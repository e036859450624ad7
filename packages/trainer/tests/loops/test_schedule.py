"""A recorded schedule is followed to the bit, whatever the timing of the second run."""

import random

import pytest

from offbeat_trainer.config import AsyncConfig, LoopConfig, Order, Partial
from offbeat_trainer.errors import PlanRefused, ResumeError, TrainerError
from offbeat_trainer.loops.journal import SqliteJournal
from offbeat_trainer.loops.schedule import Schedule
from scripted import ScriptedPool, ScriptedRun

LOOP = LoopConfig(
    steps=8, prompts_per_step=3, group_size=2, validate_every=3, validation_prompts=1, save_every=0, sample_every=0
)  # fmt: skip


def make_run(folder, timing, mode, **options):
    draws = random.Random(timing)
    return ScriptedRun(
        folder=folder, loop=LOOP, asynchrony=mode, pool=ScriptedPool(lambda request: draws.uniform(0.01, 0.8)),
        train_s=lambda step: draws.uniform(0.1, 2.0), **options,
    )  # fmt: skip


@pytest.mark.parametrize("partial", [Partial.ABORT, Partial.WAIT])
@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("seed", range(3))
def test_a_replay_repeats_the_recorded_run_to_the_bit(tmp_path, partial, order, seed):
    mode = AsyncConfig(max_staleness=3, sync_every=2, partial=partial, order=order)
    recorded = make_run(tmp_path / "a", seed, mode, journal=SqliteJournal(tmp_path / "journal.sqlite")).go()
    Schedule.of(recorded.journal.events()).write(tmp_path / "schedule.json")
    recorded.journal.close()
    schedule = Schedule.read(tmp_path / "schedule.json")
    replayed = make_run(tmp_path / "b", seed + 100, mode, replay=schedule).go()
    assert replayed.policy.history == recorded.policy.history
    assert replayed.history() == recorded.history()
    other = make_run(tmp_path / "c", seed + 100, mode).go()
    deterministic = partial is Partial.WAIT and order is Order.FIRST_IN
    assert (other.policy.history == recorded.policy.history) == deterministic, "there was something to replay"


def test_replayed_completions_may_be_of_several_versions(tmp_path):
    mode = AsyncConfig(max_staleness=3, partial=Partial.ABORT)
    run = make_run(tmp_path, 1, mode).go()
    schedule = Schedule.of(run.journal.events())
    assert max(len(one) for spans in schedule.spans.values() for one in spans) > 1


def test_what_cannot_be_replayed_is_refused(tmp_path):
    mode = AsyncConfig(max_staleness=3, partial=Partial.KEEP)
    schedule = Schedule.of(make_run(tmp_path / "a", 1, mode).go().journal.events())
    with pytest.raises(PlanRefused, match="cannot be made again"):
        make_run(tmp_path / "b", 2, mode, replay=schedule).go()
    del schedule.taken[5]
    with pytest.raises(PlanRefused, match="no step 5"):
        make_run(tmp_path / "c", 2, mode, replay=schedule).go()
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ResumeError, match="not a schedule"):
        Schedule.read(tmp_path / "other.json")


def test_a_replay_of_another_run_is_noticed(tmp_path):
    mode = AsyncConfig(max_staleness=3, partial=Partial.ABORT)
    schedule = Schedule.of(make_run(tmp_path / "a", 1, mode).go().journal.events())
    with pytest.raises(TrainerError, match="must be those of the recorded run"):
        make_run(tmp_path / "b", 1, mode, replay=schedule, seed=8).go()
