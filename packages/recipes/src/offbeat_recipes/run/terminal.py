"""What a terminal and its person do to a run: Ctrl-C, Ctrl-Z, a window that is closed.

Ctrl-C: the first asks a running loop to end after its step, the second ends the run at once. Ctrl-Z: the run stands still until
`fg`, and no deadline of the driver runs out meanwhile. A closed terminal (SIGHUP) takes the screen, and the run goes on.

Third-party loggers write to the run's log, not to the person's screen.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from transformers.utils import logging as transformers_logging

from offbeat_trainer.watch.figures import visible

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path
    from typing import Self

    from offbeat_trainer import Reporter
    from offbeat_trainer.loops.session import StopRequest


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


class _Quiet(logging.FileHandler):
    """Leaves out what cannot be written, of a full disk say: a page about each record on the screen helps nobody."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 logging's name
        """Nothing."""

    def close(self) -> None:
        """Close the file, whether or not there was room for the end of it."""
        with suppress(OSError):
            super().close()


class _Visible(logging.Formatter):
    """Escapes what a terminal would obey, and indents all lines but the first: messages quote models, data and users' exceptions."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one that nothing in it can end."""
        return "\n    ".join(map(visible, super().format(record).split("\n")))


def _log_thread(args: threading.ExceptHookArgs) -> None:
    name = "a thread" if args.thread is None else args.thread.name
    trace = None if args.exc_value is None else (args.exc_type, args.exc_value, args.exc_traceback)
    logging.getLogger(__name__).error("%s ended by an error", name, exc_info=trace)


@contextmanager
def logs_to(path: Path) -> Generator[None]:
    """While open, everything logged or warned about in this process goes to the file at `path` and nowhere else.

    So does what a thread fails of, say of a tracker whose disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _Quiet(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Visible("%(asctime)s %(name)s %(levelname)s %(message)s"))
    root, library = logging.getLogger(), logging.getLogger("transformers")
    transformers_logging.get_verbosity()  # lets the library set up its logger, which is to be put back
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in (root, library)]
    progress_bars = transformers_logging.is_progress_bar_enabled()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    library.handlers[:], library.propagate = [], True  # its own handler writes to the screen
    transformers_logging.disable_progress_bar()
    excepthook, threading.excepthook = threading.excepthook, _log_thread
    with warnings.catch_warnings():
        logging.captureWarnings(True)
        warnings.simplefilter("default")
        try:
            yield
        finally:
            logging.captureWarnings(False)
            threading.excepthook = excepthook
            for logger, handlers, level, propagate in before:
                logger.handlers[:], logger.propagate = handlers, propagate
                logger.setLevel(level)
            if progress_bars:
                transformers_logging.enable_progress_bar()
            handler.close()
