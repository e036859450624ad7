"""Where people read: a stream that may go away while the run goes on.

Several reporters as one; none of them can end a run.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO, runtime_checkable

from offbeat_trainer.watch.jsonl import KeepsTrajectories

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from offbeat_trainer.data.interface import Reporter
    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group


class Screen:
    """`stream`, but writing never fails: once a terminal, a pipe's reader or the room on a disk is gone, nothing is shown any more.

    Letters that the stream's encoding has not are shown as question marks.
    """

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Show `text`, if anybody still looks; return its length."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):
            self._leave()
        return len(text)

    def flush(self) -> None:
        """Show what was written."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._leave()

    def _leave(self) -> None:
        # What the stream still holds goes nowhere, too: or Python would stumble over it as it exits.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 whatever the stream has
        return getattr(self._stream, name)


@runtime_checkable
class Truncating(Protocol):
    """A reporter that can take back what it said: a run that goes on from a checkpoint repeats the steps after it."""

    def truncate_after(self, step: int) -> None:
        """Forget, or hide, everything said about steps beyond `step`."""
        ...


@runtime_checkable
class ShowsProgress(Protocol):
    """A reporter that shows how much of a phase is done."""

    def progress(self, done: int, total: int) -> None:
        """Of the phase announced last `done` of `total` parts are done."""
        ...


def progress_of(reporter: Reporter) -> Callable[[int, int], None] | None:
    """Return what shows how much of a phase is done, if `reporter` does."""
    return reporter.progress if isinstance(reporter, ShowsProgress) else None


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

    def progress(self, done: int, total: int) -> None:
        """Tell those that show it."""
        self._tell(lambda reporter: reporter.progress(done, total), ShowsProgress)

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Tell all."""
        self._tell(lambda reporter: reporter.metrics(step, metrics), counts=True)

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Tell all."""
        self._tell(lambda reporter: reporter.samples(step, title, groups, texts), counts=True)

    def trajectories(
        self,
        step: int,
        groups: Sequence[Group],
        decode: Callable[[list[int]], str],
        advantages: Sequence[Tensor] | None = None,
    ) -> None:
        """Tell those that keep them."""
        self._tell(
            lambda reporter: reporter.trajectories(step, groups, decode, advantages),
            KeepsTrajectories,
            counts=True,
        )

    def summary(self, values: Mapping[str, object]) -> None:
        """Tell all."""
        self._tell(lambda reporter: reporter.summary(values))

    def truncate_after(self, step: int) -> None:
        """Tell those that can (they have such a method) to forget what they said of steps beyond `step`."""
        self._tell(lambda reporter: reporter.truncate_after(step), Truncating)

    def close(self) -> None:
        """Close all."""
        self._tell(lambda reporter: reporter.close())

    def _tell(self, call: Callable[[Any], None], kind: type = object, *, counts: bool = False) -> None:
        """Let `call` tell each reporter of `kind`; with `counts` those that are gone lose it."""
        for name in self._dropped:
            self.lost[name] += counts
        for reporter in tuple(self._reporters):
            try:
                if isinstance(reporter, kind):
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
