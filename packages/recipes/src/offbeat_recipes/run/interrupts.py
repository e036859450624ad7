"""What a terminal and its person do to a run: Ctrl-C, Ctrl-Z, a window that is closed.

Ctrl-C: the first asks a running loop to end after its step, the second ends the run at once. Ctrl-Z: the run stands still until
`fg`, and no deadline of the driver runs out meanwhile. A closed terminal (SIGHUP) takes the screen, and the run goes on.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

    from offbeat_trainer import Reporter
    from offbeat_trainer.stream.parts import StopRequest

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BEAT_S = 1.0


class StandingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while the process is stopped (Ctrl-Z, SIGSTOP), once `follow` was called."""

    def __init__(self) -> None:
        self._away_s = 0.0
        self._seen_s = 0.0
        super().__init__()

    def time(self) -> float:
        """Return seconds on a clock of this loop's own."""
        self._seen_s = super().time()
        return self._seen_s - self._away_s

    def follow(self) -> None:
        """Look at the clock every second, so that it is known since when the process was stopped when it goes on."""
        signal.signal(signal.SIGCONT, self._came_back)
        self._beat()

    def _beat(self) -> None:
        self.call_later(BEAT_S, self._beat)

    def _came_back(self, *_: object) -> None:
        # Python calls this in the main thread before the loop looks for deadlines that have passed.
        now_s = super().time()
        self._away_s += max(0.0, now_s - self._seen_s - BEAT_S)
        self._seen_s = now_s


class StopKeys:
    """While open, SIGINT and SIGTERM end the run in order instead of tearing it down, and SIGHUP does nothing.

    Before the loop listens there is nothing to finish, so the first signal ends the run at once too, and says so. Beside the main
    thread, which alone gets signals, they are left alone: whoever started the run calls `press`.
    """

    def __init__(self, stop: StopRequest, reporter: Reporter) -> None:
        self._stop = stop
        self._reporter = reporter

    def __enter__(self) -> Self:
        """Take the signals over; must be called in the task that is to be cancelled."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._gets_signals = threading.current_thread() is threading.main_thread()
        if not self._gets_signals:
            return self
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._pressed)
        # Ignored, not handled: what is started from here on inherits that.
        self._hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._went_on = signal.getsignal(signal.SIGCONT)
        if isinstance(self._loop, StandingLoop):
            self._loop.follow()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        if not self._gets_signals:
            return
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, self._hang_up)
        signal.signal(signal.SIGCONT, self._went_on)

    def press(self) -> None:
        """Do as if Ctrl-C was pressed; from any thread, while this is open."""
        self._loop.call_soon_threadsafe(self._pressed)

    def _pressed(self) -> None:
        if self._stop.listening and not self._stop.requested:
            self._stop.requested = True
            self._reporter.phase(
                "stopping",
                "after this step, or the sync that follows with mode.sync_every, with a checkpoint; Ctrl-C again stops at once",
            )
            return
        if not self._stop.requested:
            self._reporter.phase("stopping", "at once: no step has begun")
        self._stop.requested = True
        assert self._task is not None
        self._task.cancel()
