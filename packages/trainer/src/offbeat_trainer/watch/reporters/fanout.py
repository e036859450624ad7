"""Several reporters as one; none of them can end a run."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from offbeat_trainer.watch.reporters.screen import Screen

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

    One that raises is named once on standard error, closed and never called again: training does not die of a
    full disk or of a tracker that went away. KeyboardInterrupt and SystemExit pass through.
    """

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        """Own `reporters`: closing this closes them."""
        self._reporters = list(reporters)

    def phase(self, name: str, detail: str = "") -> None:
        """Tell all."""
        self._tell(lambda reporter: reporter.phase(name, detail))

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Tell all."""
        self._tell(lambda reporter: reporter.metrics(step, metrics))

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Tell all."""
        self._tell(lambda reporter: reporter.samples(step, title, groups, texts))

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

    def _tell(self, call: Callable[[Reporter], None]) -> None:
        for reporter in tuple(self._reporters):
            try:
                call(reporter)
            except Exception as error:  # noqa: BLE001 - whatever a tracker throws, the run goes on without it
                self._reporters.remove(reporter)
                Screen(sys.stderr).write(
                    f"offbeat: {type(reporter).__name__} failed and is dropped, the run goes on: "
                    f"{type(error).__name__}: {error}\n"
                )
                with suppress(Exception):  # it already failed; whether it can still close changes nothing
                    reporter.close()
