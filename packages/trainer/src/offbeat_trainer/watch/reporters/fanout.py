"""Several reporters as one; none of them can end a run."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from offbeat_trainer.watch.reporters.screen import Screen
from offbeat_trainer.watch.reporters.trajectories import KeepsTrajectories

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat_trainer.data.types import Group
    from offbeat_trainer.interface import Reporter
    from offbeat_trainer.metrics import Metric


@runtime_checkable
class Truncating(Protocol):
    """A reporter that can take back what it said: a run that goes on from a checkpoint repeats the steps after it."""

    def truncate_after(self, step: int) -> None:
        """Forget, or hide, everything said about steps beyond `step`."""
        ...


class FanOut:
    """A `Reporter` that tells several others, in order.

    One that raises is named once on standard error, closed and never called again: training does not die of a tracker that went
    away. One with `keeps_trying` stays where it is an OSError: there may be room again. `lost` counts by class the metrics and
    samples that did not arrive. KeyboardInterrupt and SystemExit pass through.
    """

    def __init__(
        self, reporters: Sequence[Reporter], *, describe_error: Callable[[Exception], str] | None = None
    ) -> None:
        """Own `reporters`: closing this closes them. `describe_error` says of an error what a person can do about it, or nothing."""
        self._reporters = list(reporters)
        self._dropped: list[str] = []
        self._describe_error = describe_error
        self.lost: dict[str, int] = {}

    def phase(self, name: str, detail: str = "") -> None:
        """Tell all."""
        self._tell(lambda reporter: reporter.phase(name, detail))

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Tell all."""
        self._tell(lambda reporter: reporter.metrics(step, metrics), counts=True)

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Tell all."""
        self._tell(lambda reporter: reporter.samples(step, title, groups, texts), counts=True)

    def trajectories(self, step: int, groups: Sequence[Group], decode: Callable[[list[int]], str]) -> None:
        """Tell those that keep them."""

        def keep(reporter: Reporter) -> None:
            if isinstance(reporter, KeepsTrajectories):
                reporter.trajectories(step, groups, decode)

        self._tell(keep, counts=True)

    def summary(self, values: Mapping[str, object]) -> None:
        """Tell all."""
        self._tell(lambda reporter: reporter.summary(values))

    def truncate_after(self, step: int) -> None:
        """Tell those that can (they have such a method) to forget what they said of steps beyond `step`."""

        def truncate(reporter: Reporter) -> None:
            if isinstance(reporter, Truncating):
                reporter.truncate_after(step)

        self._tell(truncate)

    def close(self) -> None:
        """Close all."""
        self._tell(lambda reporter: reporter.close())

    def _tell(self, call: Callable[[Reporter], None], *, counts: bool = False) -> None:
        for name in self._dropped:
            self.lost[name] += counts
        for reporter in tuple(self._reporters):
            try:
                call(reporter)
            except Exception as error:  # noqa: BLE001 - whatever a tracker throws, the run goes on without it
                self._failed(reporter, error, counts=counts)

    def _failed(self, reporter: Reporter, error: Exception, *, counts: bool) -> None:
        name = type(reporter).__name__
        stays = isinstance(error, OSError) and getattr(reporter, "keeps_trying", False)
        if not stays or name not in self.lost:
            what = "could not write and tries again" if stays else "failed and is dropped"
            told = (
                self._describe_error and self._describe_error(error)
            ) or f"{type(error).__name__}: {error}"
            Screen(sys.stderr).write(f"offbeat: {name} {what}, the run goes on: {told}\n")
        self.lost[name] = self.lost.get(name, 0) + counts
        if stays:
            return
        self._reporters.remove(reporter)
        self._dropped.append(name)
        with suppress(Exception):  # it already failed; whether it can still close changes nothing
            reporter.close()
