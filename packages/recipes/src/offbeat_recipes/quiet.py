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
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:], level = before
        root.setLevel(level)
        handler.close()
