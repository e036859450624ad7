"""A journal that lasts as long as the process: for tests, and for runs that need not be resumed exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from offbeat_trainer.stream.journal.events import Finished, Taken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat_trainer.stream.journal.events import Event


class MemoryJournal:
    """Satisfies `Journal` with a list."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        """Begin with `events`."""
        self._events = list(events)

    def write(self, event: Event) -> None:
        """See `Journal.write`; a killed process takes this one along."""
        self._events.append(event)

    def events(self) -> Iterable[Event]:
        """See `Journal.events`."""
        return tuple(self._events)

    def forget(self, before_step: int) -> None:
        """See `Journal.forget`."""
        old = {
            index
            for event in self._events
            if isinstance(event, Taken) and event.step < before_step
            for index in event.indices
        }
        self._events = [
            replace(event, trajectories=()) if isinstance(event, Finished) and event.index in old else event
            for event in self._events
        ]

    def close(self) -> None:
        """See `Journal.close`."""
