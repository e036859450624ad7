"""Third-party loggers write to the run's log, not to the person's screen."""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from transformers.utils import logging as transformers_logging

from offbeat_trainer.watch.reporters.figures import visible

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


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
