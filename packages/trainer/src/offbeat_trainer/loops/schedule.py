"""The schedule of a run: who consumed what, when versions flipped, and which version made which token.

Everything that timing decides in an asynchronous run is in here; the rest is a function of settings and seeds. So a run
that follows a recorded schedule repeats the recorded one, bit for bit where the engines compute bit for bit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat_trainer.errors import PlanRefused, ResumeError
from offbeat_trainer.loops.events import Finished, Flipped, Issued, Restarted, Taken

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from offbeat_trainer.data.types import Spans
    from offbeat_trainer.loops.events import Event


@dataclass(slots=True, kw_only=True)
class Schedule:
    """A recorded schedule; only groups that were trained are in it.

    `taken` are the group indices of each step, `flips` the version that was published after so many steps, `begun` the
    version a group was begun under, and `spans` the runs of (version, tokens) of each of its completions.
    """

    taken: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    flips: dict[int, int] = field(default_factory=dict[int, int])
    begun: dict[int, int] = field(default_factory=dict[int, int])
    spans: dict[int, tuple[Spans, ...]] = field(default_factory=dict[int, "tuple[Spans, ...]"])

    @classmethod
    def of(cls, events: Iterable[Event]) -> Schedule:
        """Return what the events of a run's journal tell; the later word counts, where a run went on."""
        found = cls()
        for event in events:
            match event:
                case Issued():
                    found.begun[event.index] = event.version
                case Finished():
                    found.spans[event.index] = event.spans
                case Taken():
                    found.taken[event.step] = event.indices
                    found.begun.update(zip(event.indices, event.begun, strict=False))
                    found.spans.update(zip(event.indices, event.spans, strict=False))
                case Flipped():
                    found.flips[event.steps] = event.version
                case Restarted():
                    found.taken = {step: taken for step, taken in found.taken.items() if step < event.step}
                    found.flips = {
                        steps: version for steps, version in found.flips.items() if steps <= event.step
                    }
                case _:
                    pass
        trained = {index for indices in found.taken.values() for index in indices}
        found.begun = {index: version for index, version in found.begun.items() if index in trained}
        found.spans = {index: spans for index, spans in found.spans.items() if index in trained}
        return found

    def versions(self, index: int) -> list[int]:
        """Return the versions that made tokens of group `index`, rising."""
        return sorted({version for spans in self.spans[index] for version, _ in spans}) or [self.begun[index]]

    def obstacle(self, num_steps: int, *, kept: bool, whole: bool = False) -> tuple[str, str] | None:
        """Return why a run of `num_steps` steps cannot follow it and what to do about that, or None.

        Args:
            num_steps: steps of the run that is to follow.
            whole: whether trajectories are made in one piece or not at all: those of several turns are.
            kept: whether completions went on under new weights with the keys and values they had (`partial: keep`).
        """
        missing = sorted(set(range(num_steps)) - set(self.taken))
        if missing:
            return (
                f"the schedule has no step {missing[0]}, the run is to have {num_steps}",
                "follow a run of at least as many steps that came to its end",
            )
        mixed = [
            index
            for index, spans in self.spans.items()
            if any(len({version for version, _ in one}) > 1 for one in spans)
        ]
        if kept and mixed:
            return (
                f"group {mixed[0]} went on under new weights with the keys and values of the old ones, which cannot be "
                "made again",
                "record with `partial: abort` or `partial: wait` what is to be replayed",
            )
        apart = [index for index in self.spans if len(self.versions(index)) > 1]
        if whole and apart:
            return (
                f"several versions made group {apart[0]}, and trajectories of several turns are made again by one",
                "record with `partial: wait` what is to be replayed",
            )
        return None

    def check(self, num_steps: int, *, kept: bool, whole: bool = False) -> None:
        """Raise `PlanRefused` if there is an `obstacle`."""
        found = self.obstacle(num_steps, kept=kept, whole=whole)
        if found is not None:
            raise PlanRefused("; ".join(found))

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        fields = {name: getattr(self, name) for name in ("taken", "flips", "begun", "spans")}
        path.write_text(json.dumps(fields))

    @classmethod
    def read(cls, path: Path) -> Schedule:
        """Read what `write` wrote.

        Raises:
            ResumeError: it is something else.
        """
        try:
            fields = json.loads(path.read_text())
            return cls(
                taken={int(step): tuple(indices) for step, indices in fields["taken"].items()},
                flips={int(steps): version for steps, version in fields["flips"].items()},
                begun={int(index): version for index, version in fields["begun"].items()},
                spans={
                    int(index): tuple(tuple((version, count) for version, count in one) for one in spans)
                    for index, spans in fields["spans"].items()
                },
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResumeError(f"{path} is not a schedule ({error!r}); `Schedule.write` makes one") from error
