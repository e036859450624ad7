"""What a run's own records say about its data: journal and metrics, read after the end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from offbeat_rollout import Finish
from offbeat_trainer.loops.events import Dropped, Finished, Taken
from offbeat_trainer.loops.journal import SqliteJournal

if TYPE_CHECKING:
    from pathlib import Path

TOLERANCE = 1e-6  # between the mean reward in the metrics and that of the journal's scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Counts of groups (`lost`, `duplicated`) and of completions or steps that taught something false (`polluted`)."""

    lost: int
    duplicated: int
    polluted: int
    dropped: int


def account_of(run: Path, *, steps: int, groups_per_step: int, group_size: int) -> Account:
    """Return what became of the `steps` * `groups_per_step` groups that the run in `run` had to train.

    A step that a killed process took and a later one took again counts as the later one took it: that is what is in the
    weights. Lost is a group that no step trained, duplicated one that two did.
    """
    journal = SqliteJournal(run / "checkpoints" / "journal.sqlite")
    events = list(journal.events())
    journal.close()
    taken = {event.step: event.indices for event in events if isinstance(event, Taken)}
    finished = {event.index: event for event in events if isinstance(event, Finished)}
    trained = [index for step in range(steps) for index in taken.get(step, ())]
    wanted = set(range(steps * groups_per_step))
    return Account(
        lost=len(wanted - set(trained)),
        duplicated=len(trained) - len(set(trained)),
        polluted=sum(_bad_completions(finished[index], group_size) for index in trained)
        + _bad_steps(run / "metrics.jsonl", taken, finished),
        dropped=sum(isinstance(event, Dropped) for event in events),
    )


def steps_on_record(run: Path) -> list[dict[str, float]]:
    """Return the metrics of the run's steps so far; a line that is being written is left out."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [cast("dict[str, float]", json.loads(line)) for line in lines]


def _bad_completions(group: Finished, group_size: int) -> int:
    """Count completions that nobody made to their end: missing, empty, or cut off."""
    made = sum(one.num_tokens > 0 and one.finish is not Finish.ABORT for one in group.trajectories)
    return group_size - made


def _bad_steps(metrics: Path, taken: dict[int, tuple[int, ...]], finished: dict[int, Finished]) -> int:
    """Count steps that trained other rewards than the journal's, or whose line is missing or there twice."""
    lines = steps_on_record(metrics.parent)
    bad = sum(line["step"] != place + 1 for place, line in enumerate(lines)) + abs(len(lines) - len(taken))
    for line in lines:
        scores = [one.reward for index in taken[int(line["step"]) - 1] for one in finished[index].scores]
        bad += abs(line["reward/mean"] - sum(scores) / len(scores)) > TOLERANCE
    return bad
