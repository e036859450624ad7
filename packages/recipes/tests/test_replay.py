"""A recorded schedule is followed only by a run that can follow it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.planning.replay import open_journal, recorded_schedule
from offbeat_trainer.loops.events import Finished, Flipped, Issued, Taken

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_trainer.data.types import Spans


def record(folder: Path, spans: Spans, num_steps: int = 2) -> Path:
    """Write the journal of a run with one group a step."""
    with closing(open_journal(folder)) as journal:
        for step in range(num_steps):
            journal.write(Issued(index=step, uid=str(step), version=1))
            journal.write(Finished(index=step, version=1, trajectories=(), scores=(), spans=(spans,)))
            journal.write(Taken(step=step, indices=(step,)))
            journal.write(Flipped(steps=step + 1, version=step + 2))
    return folder


def refusals(*settings: str) -> list[str]:
    facts = gather_facts(compose_run(["trainer.steps=2", "mode=fully_async", *settings]))
    return [str(item) for item in facts.refusals if item.setting == "replay"]


def test_what_the_journal_tells_is_followed(tmp_path):
    folder = record(tmp_path / "recorded", spans=((1, 3), (2, 4)))
    settings = [f"replay={folder}", "mode=fully_async", "mode.partial=abort", "trainer.steps=2"]
    schedule = recorded_schedule(compose_run(settings))
    assert schedule is not None
    assert schedule.taken == {0: (0,), 1: (1,)}
    assert schedule.flips == {1: 2, 2: 3}
    assert refusals(*settings) == []
    assert recorded_schedule(compose_run([])) is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["mode=sync"], "leaves nothing to timing"),
        (["trainer.steps=3", "mode.partial=abort"], "has no step 2"),
        (["mode.partial=keep"], "keys and values of the old ones"),
    ],
    ids=["sync", "shorter", "kept"],
)
def test_a_schedule_that_does_not_fit_is_refused(tmp_path, settings, says):
    folder = record(tmp_path / "recorded", spans=((1, 3), (2, 4)))
    [refusal] = refusals(f"replay={folder}", *settings)
    assert says in refusal
    assert "name the folder" not in refusal, "that is for folders without a journal"


def test_a_run_without_a_journal_and_the_run_itself_are_refused(tmp_path):
    [refusal] = refusals(f"replay={tmp_path}")
    assert "holds no journal" in refusal
    [refusal] = refusals(f"replay={tmp_path}", f"run_dir={tmp_path}")
    assert "cannot follow itself" in refusal
