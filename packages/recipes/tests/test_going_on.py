"""Where a run begins that was ended before: what it said is said once, and what it came to is not forgotten."""

import json
from contextlib import closing
from types import SimpleNamespace

import pytest

from offbeat_recipes.run.context import first_step
from offbeat_recipes.run.folder import open_run_folder
from offbeat_trainer import JsonlReporter, Mean, Metric, ResumeError
from offbeat_trainer.loops.outcome import Outcome
from offbeat_trainer.loops.run_store import RunState, RunStore

REACHED = RunState(step=4, accuracy_before=0.1, accuracy_after=0.5, reward_first=0.2, reward_last=0.4)


@pytest.fixture
def context(tmp_path):
    """A run that was ended in its fifth step, opened again."""
    path = tmp_path / "run"
    open_run_folder(path, {"seed": 0}, resume=False).close()
    with closing(JsonlReporter(path)) as before:
        for step in (1, 2, 3, 4):
            before.metrics(step, [Metric("reward/mean", Mean(float(step)))])
    with (
        closing(open_run_folder(path, {"seed": 0}, resume=True)) as folder,
        closing(JsonlReporter(path)) as reporter,
    ):
        yield SimpleNamespace(folder=folder, reporter=reporter, outcome=Outcome())


async def begin(context, saved, *, steps=8, setting="trainer.steps"):
    """Return the step that the run begins with, where the checkpoint of `saved` is its newest, and what it has said by then."""

    async def load(step):
        assert step is None
        return saved

    store = RunStore(context.folder.checkpoints / "state", keep=2)
    store.save(REACHED)
    step = await first_step(context, SimpleNamespace(load=load), store, steps=steps, setting=setting)
    lines = (context.folder.path / "metrics.jsonl").read_text().splitlines()
    return step, [json.loads(line)["step"] for line in lines]


async def test_a_run_that_was_ended_before_its_first_checkpoint_says_no_step_twice(context):
    assert await begin(context, None) == (0, [])


async def test_what_supervised_training_said_in_the_same_folder_stays(context):
    (context.folder.checkpoints / "sft").mkdir(parents=True)
    assert await begin(context, None) == (0, [1, 2, 3, 4])
    assert await begin(context, None, setting="warmup.steps") == (0, [])


async def test_a_run_that_was_finished_still_knows_what_it_came_to(context):
    assert await begin(context, 4, steps=4) == (4, [1, 2, 3, 4])
    summary = context.outcome.summary()
    assert {key: summary[key] for key in ("accuracy_before", "accuracy_after", "reward_first", "reward_last")} == {
        "accuracy_before": 0.1, "accuracy_after": 0.5, "reward_first": 0.2, "reward_last": 0.4
    }  # fmt: skip


async def test_a_run_with_more_steps_than_it_is_to_have_is_refused_and_loses_nothing(context):
    with pytest.raises(ResumeError, match=r"has 4 steps already; trainer\.steps=3 is less"):
        await begin(context, 4, steps=3)
    assert len((context.folder.path / "metrics.jsonl").read_text().splitlines()) == 4
