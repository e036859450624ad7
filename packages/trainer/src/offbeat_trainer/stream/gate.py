"""The staleness gate: the one rule that keeps generation from running too far ahead of training.

N = groups a step trains. A step s trains the weights of version s + 1 (`version_of`) into those of version s + 2. A token
of version v trained in step s is `version_of(s) - v` versions old; with `max_staleness` = m it may be trained up to step
v + m - 1, its *last step*. A group is as old as the version that was served when it was begun: no token of it is older.

Two sentences keep the bound without throwing anything away, and both are about numbers only:

1. A group may be begun if all that is outstanding (begun, neither trained nor dropped) still fits into the steps up to
   the last step of the new one.
2. A step may leave a group behind only if all that is outstanding afterwards still fits before its last steps.

By 1 everything fits, by 2 it goes on fitting: earliest-deadline scheduling of unit jobs, N per step (Liu and Layland,
"Scheduling algorithms for multiprogramming in a hard-real-time environment", JACM 1973). The published rule of AReaL
(arXiv 2505.24298, section 5.1) is sentence 1 alone, which bounds staleness only if groups finish in order.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from offbeat_trainer.config import Order, Partial, TooOld
from offbeat_trainer.errors import PlanRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from offbeat_trainer.config import AsyncConfig


def version_of(step: int) -> int:
    """Return the version of the weights that step `step` trains, and in sync mode samples from.

    Version 0 is whatever folder a replica was started from; the policy before its first update is version 1.
    """
    return step + 1


class Datable(Protocol):
    """Something that must be trained by its last step."""

    @property
    def last_step(self) -> int:
        """The last step that may train it."""
        ...


_Datable = TypeVar("_Datable", bound=Datable)


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessGate:
    """The rule, as pure functions of counts.

    `groups_per_step` is N, `width` how many groups are begun for one step (more than N with over-sampling: N and its spares).
    `discard` lets generation run on, up to `capacity`; what is too old must then be dropped.
    """

    max_staleness: int
    groups_per_step: int
    num_steps: int
    over_sampling: float = 0.0
    discard: bool = False

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
            discard=config.too_old is TooOld.DISCARD,
        )

    @property
    def width(self) -> int:
        """Groups begun for one step."""
        more = self.groups_per_step * self.over_sampling
        return self.groups_per_step + math.ceil(round(more, 6))  # 0.07 of 100 is more than 7 in floats

    @property
    def capacity(self) -> int:
        """The most groups that are ever outstanding."""
        return self.width * self._num_steps_ahead

    @property
    def drops(self) -> bool:
        """Whether a step may leave behind what is then too old: it is dropped, not trained."""
        return self.discard or self.over_sampling > 0

    @property
    def _num_steps_ahead(self) -> int:
        return self.max_staleness + (2 if self.discard else 1)

    def last_step(self, version: int) -> int:
        """Return the last step that may train a token of `version`."""
        return version + self.max_staleness - 1

    def room(self, step: int, served: int, outstanding: int, replaced: int = 0) -> int:
        """Return how many groups may be begun now, under version `served`, while `step` is the next to be taken.

        `replaced` counts groups that were dropped and whose place a spare one takes: others are begun once no spares are left.
        """
        last = min(self.last_step(served), self.num_steps - 1)
        if self.discard and last >= step:
            last = self.num_steps - 1
        num_steps = min(last - step + 1, self._num_steps_ahead)
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


def check_async(config: AsyncConfig) -> None:
    """Raise `PlanRefused`, naming the setting and what to do, if `config` cannot be run."""
    checks = (
        (config.max_staleness >= 0, f"`max_staleness` must be >= 0, got {config.max_staleness}"),
        (config.sync_every >= 1, f"`sync_every` must be >= 1, got {config.sync_every}"),
        (
            config.sync_every <= config.max_staleness + 1,
            f"`sync_every` {config.sync_every} makes tokens {config.sync_every - 1} versions old before anything runs "
            f"ahead; raise `max_staleness` to at least that, or sync more often",
        ),
        (config.over_sampling >= 0, f"`over_sampling` must be >= 0, got {config.over_sampling}"),
        (
            config.too_old is TooOld.PACE or config.partial is not Partial.WAIT,
            "`too_old: discard` never stops generating, `partial: wait` waits until it has; choose one",
        ),
        (
            config.too_old is TooOld.PACE or config.order is not Order.FIRST_IN,
            "`too_old: discard` drops prompts, `order: first_in` waits for each of them; choose one",
        ),
        (
            config.partial is Partial.KEEP or not config.recompute_kv,
            "`recompute_kv` is for completions that go on through a sync, `partial: keep`; with `abort` they are computed "
            "anew in any case, with `wait` none is under way",
        ),
        (config.max_attempts >= 1, f"`max_attempts` must be >= 1, got {config.max_attempts}"),
    )
    for ok, message in checks:
        if not ok:
            raise PlanRefused(message)
