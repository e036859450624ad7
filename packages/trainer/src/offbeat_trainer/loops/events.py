"""The events of a run's data, and what a run that goes on makes of them.

A group is named by its index: the place of its prompt in the order of the data, counted from 0 over the whole run. The
prompt itself is not kept, it is a function of the index (`Task.prompts`); its uid is, to notice another task.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from offbeat_trainer.data.types import Score, Spans, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A group was begun while `version` was served: none of its tokens is older."""

    index: int
    uid: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGroup:
    """A group was interrupted; `trajectories` are what it had, to be continued from."""

    index: int
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group is whole and scored. `spans`: per trajectory, runs of (version, number of tokens)."""

    index: int
    version: int
    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...]
    spans: tuple[Spans, ...] = ()
    baseline: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step took these groups, in this order.

    Where their other events are forgotten, it says of each group what a schedule needs: the version it was begun under, and `spans`.
    """

    step: int
    indices: tuple[int, ...]
    begun: tuple[int, ...] = ()
    spans: tuple[tuple[Spans, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A group will not be trained, and why."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flipped:
    """Every replica serves `version`; `steps` are done."""

    steps: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """The run begins again with `step`, not as it was: what was finished before, and what steps from there on took, is void."""

    step: int


Event: TypeAlias = Issued | PartialGroup | Finished | Taken | Dropped | Flipped | Restarted


class Journal(Protocol):
    """Where events are kept. One process writes at a time."""

    def write(self, event: Event) -> None:
        """Keep `event`, whole or not at all, after all that were written before it; see `flush`."""
        ...

    def flush(self) -> None:
        """Return once everything written outlives a killed process. Called from any thread, as `forget` is."""
        ...

    def events(self, start: int = 0) -> Iterable[Event]:
        """Return everything that is kept, in order. The schedule of forgotten steps before `start` may be left out: see `recover`."""
        ...

    def forget(self, before_step: int) -> None:
        """Delete what is known of groups that steps before `before_step` took, and of those dropped, but for `Taken` and `Dropped`.

        Which dropped ones were begun under version `before_step` or a later one is kept: they are of the steps to come.
        """
        ...

    def close(self) -> None:
        """Release it; safe to call twice."""
        ...


class MemoryJournal:
    """Satisfies `Journal` with a list that lasts as long as the process: for tests, and for runs that need not be resumed exactly."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        """Begin with `events`."""
        self._events = list(events)

    def write(self, event: Event) -> None:
        """See `Journal.write`; a killed process takes this one along."""
        self._events.append(event)

    def flush(self) -> None:
        """See `Journal.flush`; nothing outlives this process."""

    def events(self, start: int = 0) -> Iterable[Event]:
        """See `Journal.events`."""
        del start
        return tuple(self._events)

    def forget(self, before_step: int) -> None:
        """See `Journal.forget`."""
        events = tuple(self._events)
        begun = {event.index: event.version for event in events if isinstance(event, Issued)}
        spans = {event.index: event.spans for event in events if isinstance(event, Finished)}
        over, void = newly_over(enumerate(events), before_step)
        gone = {index for one in over.values() for index in one.indices}
        dropped = {event.index for event in events if isinstance(event, Dropped)}
        void |= {
            place
            for place, event in enumerate(events)
            if (isinstance(event, Issued) and event.index in dropped and event.version < before_step)
            or (isinstance(event, (PartialGroup, Finished)) and event.index in dropped)
        }
        self._events[: len(events)] = [  # others are written meanwhile
            replace(
                event,
                begun=tuple(begun[index] for index in event.indices),
                spans=tuple(spans[index] for index in event.indices),
            )
            if isinstance(event, Taken) and place in over
            else event
            for place, event in enumerate(events)
            if place not in void
            and not (isinstance(event, (Issued, PartialGroup, Finished)) and event.index in gone)
        ]

    def close(self) -> None:
        """See `Journal.close`."""


@dataclass(slots=True, kw_only=True)
class Recovered:
    """Where the data of a run stands when it goes on with step `start`.

    What steps before `start` took is consumed: it is in the weights. What later steps took is not, for their weights
    are lost: it waits again, and `script` says which step takes it, so that the lost steps are repeated as they were.
    `gaps` were begun and not finished, or their tokens are forgotten; they are begun again, before anything new. `anew`: they are
    forgotten, and the journal is still to be told so, by `Restarted`.
    """

    start: int
    next_index: int = 0
    consumed: int = 0
    finished: dict[int, Finished] = field(default_factory=dict[int, Finished])
    partial_groups: dict[int, tuple[Trajectory, ...]] = field(
        default_factory=dict[int, "tuple[Trajectory, ...]"]
    )
    script: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    dropped: dict[int, str] = field(default_factory=dict[int, str])
    dropped_versions: dict[int, int] = field(default_factory=dict[int, int])  # begun under, of the latest
    gaps: list[int] = field(default_factory=list[int])
    uids: dict[int, str] = field(default_factory=dict[int, str])
    anew: bool = False


def newly_over(events: Iterable[tuple[int, Event]], before_step: int) -> tuple[dict[int, Taken], set[int]]:
    """Return by its place each `Taken` that is to be forgotten, and the places of those that a later event made void."""
    valid: dict[int, tuple[int, Taken]] = {}
    void: set[int] = set()
    for place, event in events:
        if isinstance(event, Restarted):
            void |= {valid.pop(step)[0] for step in list(valid) if step >= event.step}
        elif isinstance(event, Taken) and not event.begun:
            if event.step in valid:  # its weights were lost, and it was repeated
                void.add(valid[event.step][0])
            valid[event.step] = place, event
    return {place: event for place, event in valid.values() if event.step < before_step}, void


def recover(events: Iterable[Event], start: int, groups_per_step: int) -> Recovered:
    """Return what `events` come to for a run that goes on with step `start`.

    Without events the data is where sync training would be: `start` steps of `groups_per_step` prompts are consumed.
    """
    found = Recovered(start=start, next_index=start * groups_per_step, consumed=start * groups_per_step)
    taken: dict[int, tuple[int, ...]] = {}
    begun: set[int] = set()
    versions: dict[int, int] = {}
    for event in events:
        if isinstance(event, Taken):
            begun.update(event.indices)
            (taken if event.step < start else found.script)[event.step] = event.indices
            found.anew |= event.step >= start and bool(event.begun)
        elif isinstance(event, Restarted):
            taken = {step: indices for step, indices in taken.items() if step < event.step}
            _forget(found)
        else:
            if isinstance(event, Issued):
                versions[event.index] = event.version
            _note(found, event)
    found.dropped_versions = {index: versions[index] for index in found.dropped if index in versions}
    begun.update(found.uids, found.dropped)
    found.next_index = max(found.next_index, max(begun, default=-1) + 1)
    over = {index for indices in taken.values() for index in indices} | found.dropped.keys()
    for index in over:
        found.finished.pop(index, None)
        found.uids.pop(index, None)
    # `Finished` without its tokens is what format 2 of the SQLite file left of such a group.
    if found.anew or any(group.spans and not group.trajectories for group in found.finished.values()):
        # Forgotten, and the weights that they made are lost: what came later stands on those, so all of it begins again.
        _forget(found)
        found.anew = True
    for index in (*over, *found.finished):
        found.partial_groups.pop(index, None)
    found.gaps = sorted(begun - over - found.finished.keys())
    return found


def _forget(found: Recovered) -> None:
    found.finished, found.partial_groups, found.script, found.anew = {}, {}, {}, False


def _note(found: Recovered, event: Event) -> None:
    match event:
        case Issued():
            found.uids[event.index] = event.uid
        case PartialGroup():
            found.partial_groups[event.index] = event.trajectories
        case Finished():
            found.finished[event.index] = event
        case Dropped():
            found.dropped[event.index] = event.reason
        case Flipped() | Taken() | Restarted():
            pass  # for those who read the schedule; `recover` looks at the others itself
