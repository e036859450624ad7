"""Walls of the phases of a step, on one clock."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from offbeat_trainer.metrics import Metric, Sum
from offbeat_trainer.watch.clock import now_s
from offbeat_trainer.watch.timeline import Timeline
from offbeat_trainer.watch.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Generator

    from offbeat_trainer.interface import Reporter

OWNERS = {
    "generate": ("generation", "give a step's groups"),
    "reward": ("the task", "score"),
    "train": ("the training ranks", "train on a step's batch"),
    "drain": ("generation", "end under the old weights"),
    "sync": ("weight sync", "bring new weights to every replica"),
    "validate": ("generation", "answer held-out prompts"),
    "evaluate": ("the training ranks", "look at held-out rows"),
    "save": ("the training ranks", "write a checkpoint"),
}
"""Whom the loop waits for in a phase, and to do what."""


class PhaseClock:
    """Measures named phases and announces them; phases may repeat, their times add up."""

    def __init__(
        self, reporter: Reporter, timeline: Timeline | None = None, watchdog: Watchdog | None = None
    ) -> None:
        """Announce every phase to `reporter`, draw it on `timeline`, and let `watchdog` know where the loop is."""
        self._reporter = reporter
        self._timeline = Timeline() if timeline is None else timeline
        self._watchdog = Watchdog() if watchdog is None else watchdog
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Generator[None]:
        """Count the time inside the block as `name`, also when it raises."""
        self._reporter.phase(name, detail)
        started_s = now_s()
        owner, what = OWNERS.get(name, ("the run", name))
        try:
            # Bounded: each call of a phase has a deadline of its own, which names the process.
            with (
                self._timeline.phase(name, detail),
                self._watchdog.waiting("the loop", owner, what, bounded=True),
            ):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + now_s() - started_s

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per phase so far."""
        return dict(self._seconds)

    def metrics(self) -> list[Metric]:
        """Return `time/<phase>_s` of every phase."""
        return [Metric(f"time/{name}_s", Sum(seconds)) for name, seconds in self._seconds.items()]
