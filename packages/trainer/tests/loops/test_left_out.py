"""Groups that the algorithm leaves out: others take their place, they are counted apart, and runs go on as they were."""

import io
import random
import re
from dataclasses import replace

import pytest
from rich.console import Console

from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.config import AsyncConfig, GrpoConfig, LoopConfig
from offbeat_trainer.data.types import Score
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.loops.events import Dropped, Issued
from offbeat_trainer.loops.journal import SqliteJournal
from offbeat_trainer.loops.producer import REFILLS
from offbeat_trainer.loops.session import StopRequest
from offbeat_trainer.watch.figures import summary_panel
from scripted import FlatTask, ScriptedPool, ScriptedRun
from scripted.parts import prompt_number

LOOP = LoopConfig(
    steps=4, prompts_per_step=3, group_size=2, validate_every=0, validation_prompts=1, save_every=1, sample_every=0
)  # fmt: skip
MODES = ("sync", "one_step_off", "fully_async")
DYNAMIC = Grpo(config=GrpoConfig(dynamic_sampling=True))


def run_of(folder, every, mode, **options):
    return ScriptedRun(
        folder=folder,
        task=FlatTask(every),
        algorithm=options.pop("algorithm", DYNAMIC),
        mode=mode,
        loop=options.pop("loop", LOOP),
        asynchrony=AsyncConfig(max_staleness=1, over_sampling=options.pop("over_sampling", 0.0)),
        **options,
    )


def trained(run):
    """The numbers of the prompts that each step trained."""
    return [
        sorted({prompt_number(row[:4]) for row in batch["input_ids"].tolist()})
        for batch in run.policy.batches
    ]


def left_out(run):
    return [event.index for event in run.journal.events() if isinstance(event, Dropped)]


@pytest.mark.parametrize("mode", MODES)
def test_every_step_is_full_of_groups_that_teach_something(tmp_path, mode):
    run = run_of(tmp_path, 3, mode).go()
    steps = trained(run)
    assert [len(step) for step in steps] == [LOOP.prompts_per_step] * LOOP.steps
    assert all(number % 3 for step in steps for number in step)
    assert len({number for step in steps for number in step}) == LOOP.steps * LOOP.prompts_per_step
    assert len(left_out(run)) >= LOOP.steps
    assert {event.reason for event in run.journal.events() if isinstance(event, Dropped)} == {"left out flat"}
    last = run.reporter.steps[LOOP.steps - 1]
    assert last["buffer/left_out_flat_groups"] > 0
    assert not [key for key in last if key.startswith("buffer/dropped_")]
    assert (run.outcome.dropped_groups, [*run.outcome.left_out_groups]) == ({}, ["flat"])
    assert not [words for name, words in run.reporter.phases if name in ("dropped", "failing")]


@pytest.mark.parametrize("mode", MODES)
def test_all_are_trained_where_the_algorithm_keeps_them(tmp_path, mode):
    run = run_of(tmp_path, 3, mode, algorithm=Grpo(config=GrpoConfig())).go()
    assert left_out(run) == []
    assert any(number % 3 == 0 for step in trained(run) for number in step)


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_spare_groups_take_the_place_of_those_left_out_whatever_is_whole_first(tmp_path, mode, every):
    """What is begun, and trained, depends on what the groups hold; which of them were fast does not matter."""
    runs = []
    for seed in range(6):
        draws = random.Random(seed)
        pool = ScriptedPool(pace=lambda request, draws=draws: draws.uniform(0.001, 0.4))
        runs.append(
            run_of(tmp_path / str(seed), every, mode, over_sampling=0.6, pool=pool,
                   train_s=lambda step, draws=draws: draws.uniform(0.0, 3.0)).go()
        )  # fmt: skip
    for run in runs:
        assert run.policy.history == runs[0].policy.history
        last = run.reporter.steps[LOOP.steps]
        assert last["buffer/issued_groups"] == runs[0].reporter.steps[LOOP.steps]["buffer/issued_groups"]
        assert all(number % every for step in trained(run) for number in step)
        assert every == 2 or last["buffer/dropped_outpaced_groups"] > 0, "spare ones that nobody needed"


def test_a_step_begins_its_spare_groups_with_the_others(tmp_path):
    run = run_of(tmp_path, 100, "sync", over_sampling=0.6, loop=replace(LOOP, steps=2)).go()
    first = [event for event in run.journal.events() if isinstance(event, Issued) and event.version == 1]
    assert [event.index for event in first] == [0, 1, 2, 3, 4]
    assert trained(run) == [[1, 2, 3], [5, 6, 7]], "0 is flat, 3 takes its place, 4 is not needed"


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
@pytest.mark.parametrize("over_sampling", [0.0, 0.6])
def test_a_run_that_stops_and_goes_on_trains_what_it_would_have_trained(tmp_path, mode, over_sampling):
    whole = run_of(tmp_path / "whole", 2, mode, over_sampling=over_sampling).go()
    stop = StopRequest()

    def stops_in_step_2(step):
        stop.requested = stop.requested or step == 1
        return 1.0

    steps, parts = [], []
    for options in ({"stop": stop, "train_s": stops_in_step_2}, {}):
        journal = SqliteJournal(tmp_path / "journal.sqlite")
        options["over_sampling"] = over_sampling
        parts.append(run_of(tmp_path / "cut", 2, mode, journal=journal, **options).go())
        journal.close()
        steps += trained(parts[-1])
    assert parts[0].outcome.steps < LOOP.steps
    assert steps == trained(whole)
    assert parts[1].outcome.left_out_groups == whole.outcome.left_out_groups


@pytest.mark.parametrize("mode", MODES)
def test_where_nothing_teaches_anything_the_run_ends_and_says_what_to_do(tmp_path, mode):
    run = run_of(tmp_path, 1, mode)
    with pytest.raises(
        TrainerError, match=rf"left {REFILLS * 3} groups in a row .*'flat'.*dynamic_sampling=false"
    ):
        run.go()
    assert run.policy.batches == []


def test_a_few_in_a_row_are_no_failures_of_the_run(tmp_path):
    """Eight and more groups that failed in a row end a run; nine of ten that were left out do not."""

    class Rare(FlatTask):
        def score(self, prompt, trajectory):
            few = prompt_number(prompt.token_ids) % 10 == 0
            return Score(
                reward=float(trajectory.token_ids @ range(1, 1 + len(trajectory.token_ids))) if few else 1.0,
                correct=None,
            )

    run = run_of(tmp_path, 1, "sync", loop=replace(LOOP, steps=2))
    run.task = Rare(1)
    run.go()
    assert all(number % 10 == 0 for step in trained(run) for number in step)
    assert run.outcome.left_out_groups["flat"] >= 5 * 9  # between the six that were trained


def test_the_panel_says_how_many():
    console = Console(width=100, file=io.StringIO())
    console.print(
        summary_panel({"left_out_groups": {"flat": 12.0}, "trained_groups": 16, "dropped_groups": {}})
    )
    text = console.file.getvalue()
    assert re.search(r"left out\s+12 groups for 16 trained: flat 12", text)
    assert "dropped" not in text
