"""No wait without an owner and an end: who waits for whom, for what, since when, and what was the last progress.

The loop's own waits are the phases of a step, whose walls are measured on one clock.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat_trainer.config import OnStall
from offbeat_trainer.errors import DeadlineExceeded
from offbeat_trainer.metrics import Metric, Sum
from offbeat_trainer.watch.timeline import Timeline, now_s

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from offbeat_trainer.interface import Reporter

log = logging.getLogger(__name__)

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


@dataclass(slots=True, kw_only=True, eq=False)
class Wait:
    """`who` waits for `owner` to do `what`, since `since_s` on the loop's clock."""

    who: str
    owner: str
    what: str
    since_s: float
    stalled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The last thing an owner did, and when."""

    what: str
    at_s: float


@dataclass(slots=True, kw_only=True)
class Watchdog:
    """Keeps the list of waits of one event loop and ends those in which nothing has moved for `timeout_s`.

    What moves is said by `progress`. An expired wait is described by `diagnosis`, which goes to `tell`; then it raises
    `DeadlineExceeded` in the waiting task (STOP), or goes on and is told again after another `timeout_s` (REPORT).
    """

    timeout_s: float = 600.0
    on_stall: OnStall = OnStall.STOP
    tell: Callable[[str], None] = log.error
    waits: list[Wait] = field(default_factory=list[Wait])
    last: dict[str, Progress] = field(default_factory=dict[str, Progress])

    def progress(self, owner: str, what: str) -> None:
        """Note that `owner` has done something: who waits for it has `timeout_s` more."""
        self.last[owner] = Progress(what=what, at_s=now_s())

    @contextmanager
    def waiting(self, who: str, owner: str, what: str, *, bounded: bool = False) -> Generator[Wait]:
        """Register that this task waits in the block; with `bounded`, what is inside has a deadline of its own.

        Raises:
            DeadlineExceeded: nothing moved for `timeout_s`, and `on_stall` says stop; its text is the diagnosis.
        """
        wait = Wait(who=who, owner=owner, what=what, since_s=now_s())
        self.waits.append(wait)
        timer = None if bounded else _Timer(self, wait)
        try:
            yield wait
        except asyncio.CancelledError:
            if timer is not None and timer.ended_the_wait():
                raise DeadlineExceeded(self.diagnosis(wait)) from None
            raise
        finally:
            self.waits.remove(wait)
            if timer is not None:
                timer.stop()

    def expires_s(self, wait: Wait) -> float:
        """Return when `wait` runs out if nothing moves from now on."""
        last = self.last.get(wait.owner)
        return max(wait.since_s, -1.0 if last is None else last.at_s) + self.timeout_s

    def diagnosis(self, stalled: Wait) -> str:
        """Say in plain words what `stalled` waits for, what came last, and who else waits for whom."""
        others = [wait for wait in self.waits if wait is not stalled]
        lines = [
            f"nothing has moved for {self.timeout_s:g} s: {self._sentence(stalled)}",
            *(f"meanwhile {self._sentence(wait)}" for wait in others),
            "if it was only slow, raise trainer.step_timeout_s; the logs in the run folder say what each process did, "
            "and resume=auto goes on from the last checkpoint",
        ]
        return "; ".join(lines)

    def slow(self, wait: Wait) -> str:
        """Say how long `wait` has lasted if its owner has moved since it began; nothing where it has not."""
        last = self.last.get(wait.owner)
        return "" if last is None or last.at_s < wait.since_s else f"slow: {self._sentence(wait)}"

    def _sentence(self, wait: Wait) -> str:
        last = self.last.get(wait.owner)
        came = "nothing so far" if last is None else f"{last.what}, {now_s() - last.at_s:.1f} s ago"
        return (
            f"{wait.who} waits for {wait.owner} to {wait.what}, for {now_s() - wait.since_s:.1f} s "
            f"(last progress of {wait.owner}: {came})"
        )


class _Timer:
    """Looks again when a wait may have run out. One timer per wait, however often there is progress."""

    def __init__(self, dog: Watchdog, wait: Wait) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._dog = dog
        self._wait = wait
        self._task = task
        self._cancels_before = task.cancelling()
        self._arm(dog.expires_s(wait))

    def stop(self) -> None:
        self._handle.cancel()

    def ended_the_wait(self) -> bool:
        """Say whether the cancellation that is on its way is this timer's alone, and take it back if it is.

        As asyncio.Timeout does: someone else's cancellation must go on.
        """
        return self._wait.stalled and self._task.uncancel() <= self._cancels_before

    def _arm(self, when_s: float) -> None:
        self._handle = asyncio.get_running_loop().call_at(when_s, self._look)

    def _look(self) -> None:
        expires_s = self._dog.expires_s(self._wait)
        if now_s() < expires_s:
            self._arm(expires_s)
            return
        self._dog.tell(self._dog.diagnosis(self._wait))
        if self._dog.on_stall is OnStall.REPORT:
            self._arm(now_s() + self._dog.timeout_s)
            return
        self._wait.stalled = True
        self._task.cancel()


class PhaseClock:
    """Measures named phases and announces them; phases may repeat, their times add up."""

    def __init__(
        self, reporter: Reporter, timeline: Timeline | None = None, watchdog: Watchdog | None = None
    ) -> None:
        """Announce every phase to `reporter`, draw it on `timeline`, and let `watchdog` know where the loop is.

        One that lasts longer than the watchdog's `timeout_s`, while whom it waits for moves, is announced as slow.
        """
        self._reporter = reporter
        self._timeline = Timeline() if timeline is None else timeline
        self._watchdog = Watchdog() if watchdog is None else watchdog
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Generator[None]:
        """Count the time inside the block as `name`, also when it raises; waits for rewards alone count as "reward"."""
        self._reporter.phase(name, detail)
        started_s, rewards_s = now_s(), self._timeline.rewards_s
        owner, what = OWNERS.get(name, ("the run", name))
        try:
            # Bounded: each call of a phase has a deadline of its own, which names the process.
            with (
                self._timeline.phase(name, detail),
                self._watchdog.waiting("the loop", owner, what, bounded=True) as wait,
                self._told_when_slow(name, wait),
            ):
                yield
        finally:
            rewards_s = self._timeline.rewards_s - rewards_s if name in ("generate", "sync") else 0.0
            self._seconds[name] = self._seconds.get(name, 0.0) + now_s() - started_s - rewards_s
            if rewards_s:
                self._seconds["reward"] = self._seconds.get("reward", 0.0) + rewards_s

    @contextmanager
    def _told_when_slow(self, name: str, wait: Wait) -> Generator[None]:
        """Announce `name` again, with what `wait` is for, whenever another `timeout_s` have passed in the block."""

        def look() -> None:
            nonlocal timer
            if said := self._watchdog.slow(wait):
                log.warning("%s", said)
                self._reporter.phase(name, said)
            timer = loop.call_later(self._watchdog.timeout_s, look)

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # nothing moves beside a phase that is no coroutine's
            yield
            return
        timer = loop.call_later(self._watchdog.timeout_s, look)
        try:
            yield
        finally:
            timer.cancel()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per phase so far."""
        return dict(self._seconds)

    def metrics(self) -> list[Metric]:
        """Return `time/<phase>_s` of every phase."""
        return [Metric(f"time/{name}_s", Sum(seconds)) for name, seconds in self._seconds.items()]
