"""The one clock of a run: that of the event loop, so that a loop with a clock of its own moves everything."""

from __future__ import annotations

import asyncio
import time


def now_s() -> float:
    """Return seconds on the running event loop's clock; outside of one, on the clock that loops use by default."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
