"""Where a run keeps its journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_trainer.errors import ResumeError
from offbeat_trainer.stream.journal.sqlite import SqliteJournal

if TYPE_CHECKING:
    from pathlib import Path


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
