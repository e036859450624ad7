"""Walls of the phases of a step, on one clock."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from offbeat_trainer.metrics import Metric, Sum

if TYPE_CHECKING:
    from collections.abc import Generator

    from offbeat_trainer.interface import Reporter


class PhaseClock:
    """Measures named phases and announces them; phases may repeat, their times add up."""

    def __init__(self, reporter: Reporter) -> None:
        """Announce every phase to `reporter`."""
        self._reporter = reporter
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Generator[None]:
        """Count the time inside the block as `name`, also when it raises."""
        self._reporter.phase(name, detail)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per phase so far."""
        return dict(self._seconds)

    def metrics(self) -> list[Metric]:
        """Return `time/<phase>_s` of every phase."""
        return [Metric(f"time/{name}_s", Sum(seconds)) for name, seconds in self._seconds.items()]
