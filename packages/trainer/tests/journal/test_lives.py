"""Whole runs of several lives under one journal, with little or nothing saved."""

import random
from collections import Counter
from contextlib import suppress

import pytest

from offbeat_trainer.config import AsyncConfig, LoopConfig, Order, Partial
from offbeat_trainer.errors import ResumeError
from offbeat_trainer.loops.events import Finished, MemoryJournal, recover
from offbeat_trainer.loops.outcome import FORGET_EVERY
from offbeat_trainer.loops.schedule import Schedule
from offbeat_trainer.loops.session import StopRequest
from scripted import ScriptedPool, ScriptedRun, ScriptedTask


def test_another_task_under_the_same_journal_is_noticed(tmp_path):
    class Shifted(ScriptedTask):
        def prompts(self, step, num_prompts):
            return super().prompts(step + 1, num_prompts)

    loop = LoopConfig(
        steps=4, prompts_per_step=2, group_size=1, validate_every=0, validation_prompts=1, save_every=2
    )
    first = ScriptedRun(folder=tmp_path, loop=loop, asynchrony=AsyncConfig(max_staleness=1)).go()
    (tmp_path / "policy" / "policy_000004.pt").unlink()
    again = ScriptedRun(folder=tmp_path, loop=loop, task=Shifted(), journal=first.journal)
    with pytest.raises(ResumeError, match="the journal has it as"):
        again.go()


class Watched(MemoryJournal):
    """Notes the most groups whose tokens it ever held."""

    most = 0

    def write(self, event):
        super().write(event)
        held = [one for one in self.events() if isinstance(one, Finished) and one.trajectories]
        self.most = max(self.most, len(held))


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_run_that_saves_nothing_keeps_no_tokens_that_were_trained_and_can_begin_again(tmp_path, mode):
    per_step = 2
    loop = LoopConfig(
        steps=70,
        prompts_per_step=per_step,
        group_size=1,
        validate_every=0,
        validation_prompts=1,
        save_every=0,
    )
    first = ScriptedRun(folder=tmp_path, mode=mode, loop=loop, journal=Watched()).go()
    assert sorted(tmp_path.rglob("*.json")) + sorted(tmp_path.rglob("*.pt")) == []
    assert first.journal.most <= (FORGET_EVERY + 4) * per_step
    again = ScriptedRun(folder=tmp_path, mode=mode, loop=loop, journal=Watched(first.journal.events())).go()
    assert again.outcome.steps == 70
    numbers = Counter(number for numbers in again.policy.prompts for number in numbers)
    assert len(numbers) == 70 * per_step
    assert set(numbers.values()) == {1}


class Killed(Exception):
    pass


def test_a_run_that_began_again_goes_on_where_it_was_stopped(tmp_path):
    """Killed with nothing saved and its tokens forgotten, begun again, stopped before the step it was killed in, gone on with."""

    def live(number, *, killed_at=None, stopped_at=None):
        draws, stop = random.Random(number), StopRequest()

        def train_s(step):
            if step == killed_at:
                raise Killed
            stop.requested = step + 1 == stopped_at
            return draws.uniform(0.0, 3.0)

        return ScriptedRun(
            folder=tmp_path,
            loop=LoopConfig(
                steps=30,
                prompts_per_step=3,
                group_size=1,
                validate_every=0,
                validation_prompts=1,
                save_every=0,
            ),
            asynchrony=AsyncConfig(over_sampling=0.5, order=Order.LONGEST_WAITING),
            journal=journal,
            pool=ScriptedPool(pace=lambda request: draws.choice([0.001, 0.01, 2.0])),
            train_s=train_s,
            stop=stop,
            max_tokens=8,
        )

    journal = MemoryJournal()
    with pytest.raises(Killed):
        live(1, killed_at=FORGET_EVERY + 8).go()
    assert live(2, stopped_at=FORGET_EVERY + 2).go().outcome.interrupted
    last = live(3).go()
    assert last.outcome.steps == 30
    numbers = Counter(number for numbers in last.policy.prompts for number in numbers)
    assert set(numbers.values()) == {1}
    left = recover(journal.events(), 30, 3)
    assert {*numbers, *left.finished, *left.gaps, *left.dropped} == set(range(left.next_index))
    assert not set(numbers) & set(left.dropped)


@pytest.mark.parametrize("killed", ["recorded", "replayed"])
@pytest.mark.parametrize("save_every", [0, 1, 3])
@pytest.mark.parametrize("sync_every", [1, 3])
def test_a_schedule_is_followed_however_often_who_wrote_it_or_follows_it_was_killed(
    tmp_path, killed, save_every, sync_every
):
    """Interrupted completions go on from their tokens in the next life where a replay can do the same."""

    def go(name, seed, lives, replay=None):
        journal = MemoryJournal()
        for life in range(lives, -1, -1):
            draws = random.Random(f"{name} {seed} {life}")
            killed_at = draws.randint(1, 9) if life else None

            def train_s(step, draws=draws, killed_at=killed_at):
                if step == killed_at:
                    raise Killed
                return draws.uniform(0.0, 3.0)

            run = ScriptedRun(
                folder=tmp_path / f"{name} {seed}",
                loop=LoopConfig(
                    steps=10, prompts_per_step=2, group_size=2, validate_every=0, validation_prompts=1,
                    save_every=save_every, keep_checkpoints=1,
                ),
                asynchrony=AsyncConfig(max_staleness=3, sync_every=sync_every, partial=Partial.ABORT),
                journal=journal,
                pool=ScriptedPool(pace=lambda request, draws=draws: draws.choice([0.001, 0.1, 2.0])),
                train_s=train_s,
                replay=replay,
                max_tokens=8,
            )  # fmt: skip
            with suppress(Killed):
                run.go()
        assert run.outcome.steps == 10
        return run

    for seed in range(6):
        first = go("recorded", seed, 2 if killed == "recorded" else 0)
        again = go("replayed", seed, 2 if killed == "replayed" else 0, Schedule.of(first.journal.events()))
        assert again.policy.prompts == first.policy.prompts
        assert again.policy.history == first.policy.history
