"""Where a run keeps its journal: one SQLite file, or segments where the run folder is on a file system of several hosts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_trainer.stream.journal.segments import SegmentJournal
from offbeat_trainer.stream.journal.sqlite import SqliteJournal

if TYPE_CHECKING:
    from offbeat_trainer.stream.journal.events import Journal

MOUNTS = Path("/proc/self/mounts")
# As in the third column of /proc/mounts. What is in user space (fuse.*) may be anything, so it counts, too.
SHARED = (
    "9p afs beegfs ceph cifs gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs pvfs2 smb3 virtiofs wekafs"
)


def open_journal(folder: Path) -> Journal:
    """Open the journal of the run in `folder`, whichever it has; a new one is the kind that works there.

    SQLite's write-ahead log is not for file systems that hosts share (sqlite.org/wal.html).

    Raises:
        ResumeError: what is there cannot be read.
    """
    found = existing_journal(folder)
    if found is not None:
        return found
    return SegmentJournal(_segments(folder)) if shared_file_system(folder) else SqliteJournal(_sqlite(folder))


def existing_journal(folder: Path) -> Journal | None:
    """Open the journal that the run in `folder` has, or return None.

    Raises:
        ResumeError: it cannot be read.
    """
    if _sqlite(folder).is_file():
        return SqliteJournal(_sqlite(folder))
    return SegmentJournal(_segments(folder)) if _segments(folder).is_dir() else None


def shared_file_system(path: Path, mounts: Path = MOUNTS) -> str | None:
    """Return the type of the file system that `path` is or will be on if hosts may share it, or None."""
    if not mounts.exists():
        return None
    whole = path.resolve()
    kinds: dict[Path, str] = {}
    for line in mounts.read_bytes().splitlines():
        _, escaped, kind, *_ = line.split()
        point = re.sub(rb"\\(\d{3})", lambda found: bytes([int(found[1], 8)]), escaped)
        kinds[Path(os.fsdecode(point))] = kind.decode()  # a later mount hides an earlier one
    kind = next((kinds[one] for one in (whole, *whole.parents) if one in kinds), "")
    return kind if kind in SHARED.split() or kind.startswith("fuse") else None


def _sqlite(folder: Path) -> Path:
    return folder / "checkpoints" / "journal.sqlite"


def _segments(folder: Path) -> Path:
    return folder / "checkpoints" / "journal"
