"""The buffer between generation and training: how many groups may be begun, what is ready, and an account of every group.

issued = consumed + pending + dropped, at every moment: the sentence is checked after each change. Nothing is polled:
whoever waits names a condition, and each change wakes those whose condition it fulfils.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, assert_never

from offbeat_trainer.config import Order, check_async
from offbeat_trainer.data.types import oldest_version, spans_of, version_of
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.loops.events import Dropped, Finished, Issued, Recovered, Taken
from offbeat_trainer.watch.watchdog import now_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from offbeat_trainer.config import AsyncConfig
    from offbeat_trainer.data.types import Group
    from offbeat_trainer.loops.events import Journal
    from offbeat_trainer.loops.schedule import Schedule

OUTPACED = "outpaced"  # over-sampled, and the others were faster, or enough


class Datable(Protocol):
    """Something that must be trained by its last step."""

    @property
    def last_step(self) -> int:
        """The last step that may train it."""
        ...


_Datable = TypeVar("_Datable", bound=Datable)


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessGate:
    """The one rule that keeps generation from running too far ahead of training, as pure functions of counts.

    N = groups a step trains. A step s trains the weights of version s + 1 (`data.types.version_of`) into those of version s + 2. A token
    of version v trained in step s is `version_of(s) - v` versions old; with `max_staleness` = m it may be trained up to step
    v + m - 1, its *last step*. A group is as old as the version that was served when it was begun: no token of it is older.

    Two sentences keep the bound without throwing anything away, and both are about numbers only:

    1. A group may be begun if all that is outstanding (begun, neither trained nor dropped) still fits into the steps up to
       the last step of the new one.
    2. A step may leave a group behind only if all that is outstanding afterwards still fits before its last steps.

    By 1 everything fits, by 2 it goes on fitting: earliest-deadline scheduling of unit jobs, N per step (Liu and Layland,
    "Scheduling algorithms for multiprogramming in a hard-real-time environment", JACM 1973). The published rule of AReaL
    (arXiv 2505.24298, section 5.1) is sentence 1 alone, which bounds staleness only if groups finish in order.

    `groups_per_step` is N, `width` how many groups are begun for one step (more than N with over-sampling: N and its spares).
    """

    max_staleness: int
    groups_per_step: int
    num_steps: int
    over_sampling: float = 0.0

    @classmethod
    def from_config(cls, config: AsyncConfig, *, groups_per_step: int, num_steps: int) -> StalenessGate:
        """Return the gate that `config` describes, for a run of `num_steps` steps.

        Raises:
            PlanRefused: a setting is out of range, or two of them contradict each other.
        """
        check_async(config)
        return cls(
            max_staleness=config.max_staleness,
            groups_per_step=groups_per_step,
            num_steps=num_steps,
            over_sampling=config.over_sampling,
        )

    @property
    def width(self) -> int:
        """Groups begun for one step."""
        more = self.groups_per_step * self.over_sampling
        return self.groups_per_step + math.ceil(round(more, 6))  # 0.07 of 100 is more than 7 in floats

    @property
    def drops(self) -> bool:
        """Whether a step may leave behind what is then too old: it is dropped, not trained."""
        return self.over_sampling > 0

    def last_step(self, version: int) -> int:
        """Return the last step that may train a token of `version`."""
        return version + self.max_staleness - 1

    def room(self, step: int, served: int, outstanding: int, replaced: int = 0) -> int:
        """Return how many groups may be begun now, under version `served`, while `step` is the next to be taken.

        `replaced` counts groups that were dropped and whose place a spare one takes: others are begun once no spares are left.
        """
        last = min(self.last_step(served), self.num_steps - 1)
        num_steps = min(last - step + 1, self.max_staleness + 1)
        with_spares = self.width * num_steps - replaced
        return max(0, max(with_spares, self.groups_per_step * num_steps) - outstanding)

    def due(self, step: int, outstanding: Mapping[int, int]) -> dict[int, int]:
        """Return, by last step, how many of those due by then must be trained in `step` for the rest to fit.

        `outstanding` counts groups by last step. Entries that ask for nothing are left out.
        """
        if self.drops:
            return {}
        by_last_step: dict[int, int] = {}
        due = 0
        for last in sorted(outstanding):
            due += outstanding[last]
            must = due - self.groups_per_step * (last - step)
            if must > 0:
                by_last_step[last] = must
        return by_last_step

    def ready(self, step: int, outstanding: Mapping[int, int], finished: Mapping[int, int]) -> bool:
        """Say whether `step` can be filled from what is finished without leaving behind what would be too late."""
        if sum(finished.values()) < self.groups_per_step:
            return False
        return all(
            sum(count for last, count in finished.items() if last <= by) >= must
            for by, must in self.due(step, outstanding).items()
        )

    def choose(
        self, step: int, finished: Iterable[_Datable], outstanding: Mapping[int, int]
    ) -> list[_Datable]:
        """Return the N groups that `step` trains: the first of `finished`, as far as the others stay in time.

        Call it when `ready`. What is due is nested (due by 3 is due by 4), so one pass is enough: a group that is
        passed over, because the slots left are all due to earlier ones, would be passed over later, too.
        """
        due = list(self.due(step, outstanding).items())  # by last step, in order
        bys = [by for by, _ in due]
        counted = [0] * (len(due) + 1)  # how many of those chosen count from here on
        slots = self.groups_per_step
        chosen: list[_Datable] = []
        for one in finished:
            place = bisect.bisect_left(bys, one.last_step)
            if place and _takes_due(due[:place], counted, slots):  # for most, nothing is due before them
                continue
            chosen.append(one)
            counted[place] += 1
            slots -= 1
            if slots == 0:
                break
        assert slots == 0, "`choose` needs `ready`"
        return chosen


def _takes_due(due: list[tuple[int, int]], counted: list[int], slots: int) -> bool:
    """Say whether all `slots` that are left are due to groups due by one of the steps in `due`."""
    return any(
        must - done >= slots for (_, must), done in zip(due, itertools.accumulate(counted), strict=False)
    )


@dataclass(slots=True, kw_only=True)
class Entry:
    """One pending group. `group` is None until it is whole and scored; `oldest` is then the version of its oldest token."""

    index: int
    version: int
    last_step: int
    group: Group | None = None
    oldest: int | None = None
    finished_s: float = 0.0


class GroupBuffer:
    """Groups on their way, bounded by the gate. One event loop, one feeder, one taker."""

    def __init__(
        self,
        gate: StalenessGate,
        order: Order,
        journal: Journal,
        *,
        recovered: Recovered | None = None,
        replay: Schedule | None = None,
        on_drop: Callable[[int], None] | None = None,
    ) -> None:
        """Take over the account of an earlier process, if there was one, before anything is issued; `on_drop` hears of each drop.

        A recorded schedule to `replay` decides what is begun, and which groups each step takes.
        """
        recovered = Recovered(start=0) if recovered is None else recovered
        self.gate = gate
        self.step: int = recovered.start
        self.served: int = version_of(recovered.start)
        self.consumed: int = recovered.consumed
        self.dropped: Counter[str] = Counter(recovered.dropped.values())
        self.issued: int = self.consumed + self.dropped.total()
        self.script = dict(recovered.script)  # steps whose groups are settled already
        self._replays = replay is not None  # the gate has agreed to all of it then
        if replay is not None:
            self.script |= {step: indices for step, indices in replay.taken.items() if step >= self.step}
        self._order = order
        self._journal = journal
        self._on_drop = on_drop
        self._entries: dict[int, Entry] = {}
        self._gaps = set(recovered.gaps)  # begun by an earlier process, not yet by this one
        self._outstanding: Counter[int] = Counter()  # by last step
        # Dropped ones, by last step. In order, a spare group takes the place of each: what is begun depends on what groups hold,
        # and not on which of them were whole when a step was taken.
        self._replaced = Counter(map(gate.last_step, recovered.dropped_versions.values()))
        self._finished: Counter[int] = Counter()
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._ready: list[tuple[float, int, Entry]] = []  # a heap: what `_chosen` takes first is first
        self._head: list[Entry] | None = None  # what `_first` returns, while it holds
        self._error: BaseException | None = None

    @property
    def pending(self) -> int:
        """Groups begun, neither consumed nor dropped."""
        return len(self._entries)

    @property
    def ready_groups(self) -> int:
        """Groups that are whole and wait to be taken: the length of the queue."""
        return self._finished.total()

    @property
    def running(self) -> int:
        """Groups being generated or scored."""
        return self.pending - self.ready_groups

    def room(self) -> int:
        """Return how many groups may be begun now."""
        return self._room(self.served)

    def missing(self) -> int:
        """Return how many groups the next step still waits for, as far as that can be said; at least 1 if any."""
        if self._is_ready(self.step):
            return 0
        if self.step in self.script:
            return sum(self._group(index) is None for index in self.script[self.step])
        return max(1, self.gate.groups_per_step - self.ready_groups)

    def restore(self, index: int, version: int, group: Group) -> None:
        """Take back a group that an earlier process finished."""
        self._add(index, version)
        self._settle(self._entries[index], group)
        self.touch()

    def room_for(self, version: int) -> bool:
        """Say whether a group that has tokens of `version` already may be begun now."""
        return self._room(min(version, self.served)) > 0

    def issue(self, index: int, uid: str, version: int) -> None:
        """Count a group as begun under `version`: the one served now, or an older one that it has tokens of."""
        assert self._replays or self.room_for(version), "the gate is closed"
        self._journal.write(Issued(index=index, uid=uid, version=version))
        self._add(index, version)
        self.touch()

    def finish(self, index: int, group: Group) -> None:
        """Take in a whole, scored group; one that was dropped meanwhile is passed over."""
        entry = self._entries.get(index)
        if entry is None:
            return
        assert entry.group is None, f"group {index} was finished twice"
        self._journal.write(
            Finished(
                index=index,
                version=entry.version,
                trajectories=group.trajectories,
                scores=group.scores,
                baseline=group.baseline,
                spans=tuple(map(spans_of, group.trajectories)),
            )
        )
        self._settle(entry, group)
        self.touch()

    def drop(self, index: int, reason: str) -> None:
        """Give a pending group up, for `reason` (a few words; they become a metric's name)."""
        entry = self._entries.get(index)
        if entry is None:
            return
        self._journal.write(Dropped(index=index, reason=reason))
        self._remove(entry)
        self._replaced[entry.last_step] += 1
        self.dropped[reason] += 1
        if self._on_drop is not None:
            self._on_drop(index)
        self.touch()

    def serve(self, version: int) -> None:
        """Note that every replica serves `version`: the gate may open."""
        assert version >= self.served, "versions only rise"
        self.served = version
        self.touch()

    def fail(self, error: BaseException) -> None:
        """Make everyone who waits, now or later, raise `error`."""
        self._error = self._error or error
        self.touch()

    async def leave(self) -> None:
        """Wait until one more group may be begun."""
        await self.until(lambda: self.room() > 0)

    async def settled(self) -> None:
        """Wait until nothing is under way and nothing more may be begun under this version."""
        await self.until(lambda: self.running == 0 and self.room() == 0)

    async def take(self, step: int) -> list[Entry]:
        """Wait for the groups of `step` and consume them, in the order of their prompts; each has its group.

        Which they are is up to the gate and the order, except for steps of `script`, which are repeated as they were.
        """
        assert step == self.step, f"steps are taken in turn: {self.step} is next, not {step}"
        await self.until(lambda: self._is_ready(step))
        entries = self._chosen(step)
        assert all(entry.group is not None for entry in entries)
        self._journal.write(Taken(step=step, indices=tuple(entry.index for entry in entries)))
        for entry in entries:
            self._remove(entry)
        self.consumed += len(entries)
        self.step = step + 1
        self._drop_late(OUTPACED)
        self._replaced = Counter({last: count for last, count in self._replaced.items() if last > step})
        self.touch()
        return entries

    async def until(self, met: Callable[[], bool]) -> None:
        """Wait until `met()`; it is asked after every change, and only then.

        Raises:
            BaseException: what `fail` was given.
        """
        while self._error is None and not met():
            change = asyncio.get_running_loop().create_future()
            item = (met, change)
            self._waiting.append(item)
            try:
                await change
            finally:
                self._waiting.remove(item)
        if self._error is not None:
            raise self._error

    def _room(self, version: int) -> int:
        still_open = (count for last, count in self._replaced.items() if last >= self.step)
        replaced = sum(still_open) if self._order is Order.FIRST_IN else 0
        return self.gate.room(self.step, version, self.pending, replaced)

    def _is_ready(self, step: int) -> bool:
        if step in self.script:
            return all(self._group(index) is not None for index in self.script[step])
        if self._order is Order.FIRST_IN:
            first = self._first()
            return (
                len(first) == self.gate.groups_per_step
                and all(entry.group is not None for entry in first)
                and not any(index < first[-1].index for index in self._gaps)
            )
        return self.gate.ready(step, self._outstanding, self._finished)

    def _chosen(self, step: int) -> list[Entry]:
        if step in self.script:
            return [self._entries[index] for index in self.script[step]]
        if self._order is Order.FIRST_IN:
            return list(self._first())
        seen: list[tuple[float, int, Entry]] = []
        chosen = self.gate.choose(step, self._queue(seen), self._outstanding)
        taken = {entry.index for entry in chosen}
        for item in seen:  # passed over, because others are owed: they keep their place
            if item[1] not in taken:
                heapq.heappush(self._ready, item)
        return sorted(chosen, key=lambda entry: entry.index)

    def _queue(self, seen: list[tuple[float, int, Entry]]) -> Iterator[Entry]:
        """Yield finished groups by rank, no more of them than are asked for; they leave the queue and go to `seen`."""
        while self._ready:
            item = heapq.heappop(self._ready)
            entry = item[2]
            if (
                self._entries.get(entry.index) is entry
            ):  # dropped ones, and those of a script, are left in the queue
                seen.append(item)
                yield entry

    def _first(self) -> list[Entry]:
        """Return the pending groups of the lowest indices, one step's worth if there are so many."""
        if self._head is None:  # ten thousand pending groups are not sorted at every change
            self._head = heapq.nsmallest(
                self.gate.groups_per_step, self._entries.values(), key=lambda entry: entry.index
            )
        return self._head

    def _rank(self, entry: Entry) -> float:
        match self._order:
            case Order.FIRST_IN:
                return 0.0
            case Order.OLDEST_VERSION:
                return float(entry.version)
            case Order.LONGEST_WAITING:
                return entry.finished_s
            case _:
                assert_never(self._order)

    def _group(self, index: int) -> Group | None:
        entry = self._entries.get(index)
        return None if entry is None else entry.group

    def _add(self, index: int, version: int) -> None:
        assert index not in self._entries, f"group {index} was issued twice"
        last_step = self.gate.last_step(version)
        self._entries[index] = Entry(index=index, version=version, last_step=last_step)
        self._outstanding[last_step] += 1
        self.issued += 1
        self._gaps.discard(index)
        head = self._head
        if head is None or len(head) < self.gate.groups_per_step or index < head[-1].index:
            self._head = None

    def _settle(self, entry: Entry, group: Group) -> None:
        entry.group = group
        # Looked at here, and not when a step is taken: the trainer waits for that.
        entry.oldest = oldest_version(group.trajectories)
        entry.finished_s = now_s()
        self._finished[entry.last_step] += 1
        if self._order is Order.FIRST_IN or self._replays:
            return  # `_first` or the schedule says what is taken
        # By rank, then index: an index is in use once, so entries themselves are never compared.
        heapq.heappush(self._ready, (self._rank(entry), entry.index, entry))

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.index]
        self._head = None
        _less_one(self._outstanding, entry.last_step)
        if entry.group is not None:
            _less_one(self._finished, entry.last_step)

    def _drop_late(self, reason: str) -> None:
        if not any(last < self.step for last in self._outstanding):  # ten thousand entries are not looked at
            return
        late = [entry for entry in self._entries.values() if entry.last_step < self.step]
        scripted = {index for indices in self.script.values() for index in indices} if late else set[int]()
        late = [entry for entry in late if entry.index not in scripted]
        if late and not self.gate.drops:
            raise TrainerError(
                f"{len(late)} groups can no longer be trained within max_staleness {self.gate.max_staleness} in step "
                f"{self.step}, the first begun under version {late[0].version}; the gate should have prevented it"
            )
        for entry in late:
            self.drop(entry.index, reason)

    def touch(self) -> None:
        """Ask all who wait with `until` again: something changed, of which the buffer may not know."""
        assert self.issued == self.consumed + self.pending + self.dropped.total(), (
            "a group is unaccounted for"
        )
        for met, change in self._waiting:
            if not change.done() and (self._error is not None or met()):
                change.set_result(None)


def _less_one(counts: Counter[int], key: int) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
