"""Folders that go with the process that made them: who comes later removes those of processes that were killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

SGLANG = "offbeat-sglang-held-"
_RANDOM = "?" * 8  # what `mkdtemp` adds
_NUM_TRIES = 100


class HeldFolder:
    """An empty folder (0700) of this process, in `where` or else where temporary files lie; `close` removes it.

    Its lock lasts as long as the process does, whatever namespace that lives in. A killed process leaves its folder behind,
    with nobody's lock: the next that is made in `where` with the same `prefix` removes it. So nobody else may name folders so.
    """

    def __init__(self, where: Path, prefix: str = SGLANG) -> None:
        where = where if where.is_dir() else Path(tempfile.gettempdir())
        for left in where.glob(f"{prefix}{_RANDOM}"):
            with suppress(OSError):  # somebody holds it, or it is another user's
                _remove(left, _lock(left))
        for _ in range(_NUM_TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
            with suppress(OSError):  # one who looked for what is left has taken it for that
                self._lock = _lock(self.path)
                if self.path.exists():
                    return
                os.close(self._lock)
        raise OSError(
            f"every folder made in {where} was taken away at once; see what removes {prefix}* there"
        )

    def close(self) -> None:
        """Remove it and all that is in it."""
        _remove(self.path, self._lock)


def _lock(folder: Path) -> int:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
