"""The journal as one SQLite file in WAL mode (sqlite.org/wal.html).

A commit appends to the log beside the database with an ordinary write: it outlives a killed process at once. What
survives a power cut is everything up to the last `forget`, which is called with every checkpoint and flushes to disk;
later events belong to steps whose weights such a cut loses, too.
"""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING

from offbeat_trainer.errors import ResumeError
from offbeat_trainer.stream.journal.rows import from_row, to_row

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from offbeat_trainer.stream.journal.events import Event

FORMAT = 2
_READ = (0, 1, FORMAT)  # 0 is a new file; 1 is the same without turns
BUSY_TIMEOUT_S = 10.0
LOG_PAGES = 1 << 15  # of 4 KiB

_TABLE = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,  -- index of a group, or a step
    version INTEGER,
    detail TEXT,
    body BLOB
)
"""
# Those that `forget` looks for: without it each of thousands of groups would be a walk over the whole run.
_BODIES = "CREATE INDEX IF NOT EXISTS bodies ON events (number) WHERE body IS NOT NULL"
_FORGET = (
    "UPDATE events SET body = NULL WHERE number = ? AND kind IN ('finished', 'half') AND body IS NOT NULL"
)
_INSERT = "INSERT INTO events (kind, number, version, detail, body) VALUES (?, ?, ?, ?, ?)"


class SqliteJournal:
    """Satisfies `Journal` with a file."""

    def __init__(self, path: Path) -> None:
        """Open `path`, or make it.

        Raises:
            ResumeError: it is not a journal, or one of another format.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._open = True
        # isolation_level None: every statement is a transaction of its own, and no BEGIN is sent in between.
        self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            # The log is moved into the database, and flushed, by `forget`; by itself only when it has grown large.
            self._db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in _READ:
                raise ResumeError(f"{path} has format {version}, this version reads {FORMAT}")
            self._db.execute(_TABLE)
            self._db.execute(_BODIES)
            self._db.execute(f"PRAGMA user_version={FORMAT}")
        except sqlite3.DatabaseError as error:
            self.close()
            raise ResumeError(f"{path} cannot be used as a journal: {error}") from error

    def write(self, event: Event) -> None:
        """See `Journal.write`."""
        self._db.execute(_INSERT, to_row(event))

    def events(self) -> Iterator[Event]:
        """See `Journal.events`."""
        for row in self._db.execute("SELECT kind, number, version, detail, body FROM events ORDER BY seq"):
            yield from_row(row)

    def forget(self, before_step: int) -> None:
        """See `Journal.forget`; then everything is flushed to disk."""
        taken = self._db.execute(
            "SELECT detail FROM events WHERE kind = 'taken' AND number < ? AND version IS NULL",
            (before_step,),
        ).fetchall()
        old = [(index,) for (detail,) in taken for index in json.loads(detail)]
        self._db.execute("BEGIN")
        self._db.executemany(
            _FORGET,
            old,
        )
        # The mark keeps the next call from going over the same steps again.
        self._db.execute("UPDATE events SET version = 1 WHERE kind = 'taken' AND number < ?", (before_step,))
        self._db.execute("COMMIT")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """See `Journal.close`."""
        if self._open:
            self._open = False
            self._db.close()
