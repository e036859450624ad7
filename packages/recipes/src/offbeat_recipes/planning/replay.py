"""Following the recorded schedule of an earlier run: what timing decided there is decided alike here."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_engine.config import Refusal
from offbeat_trainer.errors import ResumeError
from offbeat_trainer.loops.journal import SqliteJournal
from offbeat_trainer.loops.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_recipes.settings.tree import RunConfig


def open_journal(folder: Path) -> SqliteJournal:
    """Open the journal of the run in `folder`, or make it.

    Raises:
        ResumeError: what is there cannot be read.
    """
    old = folder / "checkpoints" / "journal"
    if old.is_dir():
        raise ResumeError(
            f"{old} is a journal in segments, which this version does not read; "
            "finish the run with the version that began it, or start it anew"
        )
    return SqliteJournal(_path(folder))


def existing_journal(folder: Path) -> SqliteJournal | None:
    """Open the journal that the run in `folder` has, or return None.

    Raises:
        ResumeError: it cannot be read.
    """
    there = _path(folder).is_file() or _path(folder).with_suffix("").is_dir()
    return open_journal(folder) if there else None


def _path(folder: Path) -> Path:
    return folder / "checkpoints" / "journal.sqlite"


def recorded_schedule(config: RunConfig) -> Schedule | None:
    """Return the schedule of the run in folder `replay`, or None where there is nothing to be followed.

    Raises:
        ResumeError: the folder holds no journal that can be read.
    """
    if not config.replay:
        return None
    journal = existing_journal(Path(config.replay))
    if journal is None:
        raise ResumeError(f"{config.replay} holds no journal: no checkpoints/journal.sqlite")
    with closing(journal) as recorded:
        return Schedule.of(recorded.events())


def replay_refusals(config: RunConfig) -> Iterator[Refusal]:
    """Refuse a schedule that cannot be followed by this run."""
    if not config.replay:
        return
    if config.mode.name == "sync":
        yield Refusal(
            "replay",
            "mode=sync leaves nothing to timing",
            "leave it out: a run with the same settings and seed repeats itself; or choose the mode of the recorded run",
        )
        return
    if Path(config.replay).resolve() == config.folder.resolve():
        yield Refusal("replay", "a run cannot follow itself", "give this run another run_dir")
        return
    try:
        schedule = recorded_schedule(config)
    except ResumeError as error:
        yield Refusal("replay", str(error), "name the folder of a run in an asynchronous mode")
        return
    assert schedule is not None
    kept = config.asynchrony.partial.goes_on
    steps = 0 if config.trainer.epochs else config.trainer.steps  # counted later, and looked at again then
    found = schedule.obstacle(steps, kept=kept, whole=config.turns is not None)
    if found is not None:
        yield Refusal("replay", *found)
