"""Ctrl-C: the first asks a running loop to end after its step, the second ends the run at once."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_trainer import Reporter
    from offbeat_trainer.stream.parts import StopRequest

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopKeys:
    """While open, SIGINT and SIGTERM end the run in order instead of tearing it down.

    Before the loop listens there is nothing to finish, so the first signal ends the run at once too.
    """

    def __init__(self, stop: StopRequest, reporter: Reporter) -> None:
        self._stop = stop
        self._reporter = reporter

    def __enter__(self) -> None:
        """Take the signals over; must be called in the task that is to be cancelled."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._pressed)

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)

    def _pressed(self) -> None:
        if self._stop.listening and not self._stop.requested:
            self._stop.requested = True
            self._reporter.phase(
                "stopping",
                "after this step, or the sync that follows with mode.sync_every, with a checkpoint; Ctrl-C again stops at once",
            )
            return
        self._stop.requested = True
        assert self._task is not None
        self._task.cancel()
