"""The command lines. Each has a `main` that returns the exit code; only these modules read the environment."""

from __future__ import annotations

import time

STARTED_S = time.perf_counter()
"""When the command began, as nearly as Python can tell: what a person waits for counts from here."""
