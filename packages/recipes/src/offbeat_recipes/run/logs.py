"""Third-party loggers write to the run's log, not to the person's screen."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


@contextmanager
def logs_to(path: Path) -> Generator[None]:
    """While open, everything logged or warned about in this process goes to the file at `path` and nowhere else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    root, library = logging.getLogger(), logging.getLogger("transformers")
    transformers_logging.get_verbosity()  # lets the library set up its logger, which is to be put back
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in (root, library)]
    progress_bars = transformers_logging.is_progress_bar_enabled()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    library.handlers[:], library.propagate = [], True  # its own handler writes to the screen
    transformers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        logging.captureWarnings(True)
        warnings.simplefilter("default")
        try:
            yield
        finally:
            logging.captureWarnings(False)
            for logger, handlers, level, propagate in before:
                logger.handlers[:], logger.propagate = handlers, propagate
                logger.setLevel(level)
            if progress_bars:
                transformers_logging.enable_progress_bar()
            handler.close()
