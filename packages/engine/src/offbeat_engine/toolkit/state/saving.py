"""The handle of a checkpoint that may still be on its way to disk."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from offbeat_engine.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


class SaveHandle:
    """What `Engine.save_checkpoint` returns: one checkpoint, whole or under way. Nothing of it is a collective."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        """Of the checkpoint `folder`, which should be whole, copied and counted within `timeout_s` from now."""
        self.folder = folder
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._told = False

    @classmethod
    def ended(cls, folder: Path) -> SaveHandle:
        """Return the handle of a checkpoint that is whole already: of an engine that saves while its caller waits."""
        handle = cls(folder, 0.0)
        handle.end()
        return handle

    def end(self, error: BaseException | None = None) -> None:
        """Say (once, from the engine) that the save has ended, well or with `error`."""
        self._error = error
        self._ended.set()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; `wait` returns or raises at once then."""
        return self._ended.is_set()

    @property
    def untold(self) -> BaseException | None:
        """Return what went wrong if nobody has been told by `wait`; for the engine's next call."""
        return None if self._told else self._error

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is whole, copied to its remote path, and older ones are pruned.

        Args:
            timeout_s: the longest to wait; None for what is left of the engine's own deadline.

        Raises:
            CheckpointError: it could not be written or copied (all ranks are told the same), or it was still under way
                at the deadline; then it goes on, and can be waited for again.
        """
        left = max(0.0, self._deadline - time.monotonic()) if timeout_s is None else timeout_s
        if not self._ended.wait(left):
            raise CheckpointError(
                f"{self.folder} was not whole and copied after {self._timeout_s if timeout_s is None else timeout_s:g} s; "
                "it goes on in the background: wait longer, or raise `checkpoint_timeout_s`"
            )
        self._told = True
        if self._error is not None:
            raise CheckpointError(str(self._error)) from self._error
