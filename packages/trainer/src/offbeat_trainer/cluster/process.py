"""What every process of a run does first: put its output where a person finds it, and say who it is."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path


def redirect_output(log_path: str) -> None:
    """Send this process's stdout and stderr, and those of its children, to `log_path` (appended)."""
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
    )
