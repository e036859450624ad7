"""When everybody did what: a trace for people (ui.perfetto.dev), and where the time went, in one sentence.

The trace is in the JSON trace-event format ("Trace Event Format", Google, docs.google.com/document/d/1CvAClvFfyA5R-
PhYUmn5OOQtYMH4h6I0nSsKchNAySU), written line by line: a killed run leaves a file that Perfetto still opens.

No wait without an owner and an end: who waits for whom, for what, since when, and what was the last progress.

The loop's own waits are the phases of a step, whose walls are measured on one clock.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from offbeat_trainer.data.metrics import Mean, Metric, Sum
from offbeat_trainer.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from offbeat_trainer.data.interface import Reporter


TRAINER = "trainer"
GENERATION = "generation"
TRAINING = "train"
TAIL = "tail"
"""Share of the groups of a step that count as its long tail: the slowest 2 %, at least one."""
TAIL_SHARE = 0.02

# What each side does while the loop is in a phase, as the end of a sentence.
_TRAINER_WAITS = {
    "generate": "for generation",
    "reward": "for rewards",
    "drain": "for generation to end under the old weights",
    "sync": "for the weight sync",
    "validate": "for validation",
    "save": "for a checkpoint to be written",
}
_GENERATION_WAITS = {
    "train": "for training (the staleness bound was reached)",
    "sync": "for the weight sync",
    "reward": "for rewards",
    "save": "for a checkpoint to be written",
}


def now_s() -> float:
    """Return seconds on the one clock of a run, that of the event loop: a loop with a clock of its own moves everything.

    Outside of a loop it is the clock that loops use by default.
    """
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """`who` had nothing to do for `seconds` of `total_s`, because of `cause`, a phase of the loop or `TAIL`."""

    who: str
    cause: str
    seconds: float
    total_s: float

    @property
    def share(self) -> float:
        """The part of the run."""
        return self.seconds / self.total_s if self.total_s else 0.0


class Timeline:
    """Adds up idle time as it passes, and writes the trace if it has a file."""

    def __init__(self, path: Path | None = None, *, max_bytes: int = 64 << 20) -> None:
        """Write the trace to `path`, or to nowhere; an earlier one is replaced with the first thing there is to draw.

        When it has `max_bytes` it becomes `<name>.before<suffix>`, in place of an earlier one, and a new one begins: of a long
        run the last part stays, in two files.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._file: IO[str] | None = None
        self._num_bytes = 0
        self._tracks: dict[str, int] = {}
        self._phases: list[str] = []
        self._running = 0
        self._scoring = 0
        self._idle: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._tail_s = 0.0
        self.lost: list[str] = []  # replicas that were lost, each time with the reason
        self.rewards_s = 0.0  # in which the loop waited for groups that were all generated and not all scored
        self._first_s: float | None = None
        self._last_s = 0.0

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Generator[None]:
        """The loop is in phase `name`: on the trainer's track, and the cause of whoever idles meanwhile."""
        self._pass_time()
        self._phases.append(name)
        try:
            with self.span(TRAINER, name, detail=detail):
                yield
        finally:
            self._pass_time()
            self._phases.pop()

    @contextmanager
    def span(self, track: str, name: str, **details: object) -> Generator[None]:
        """Draw what happens in the block on `track`; spans of one track must not overlap, but may nest."""
        started_s = now_s()
        try:
            yield
        finally:
            self._event(
                track, ph="X", name=name, ts=_us(started_s), dur=_us(now_s() - started_s), args=details
            )

    @contextmanager
    def generating(self, name: str, num_groups: int = 1) -> Generator[None]:
        """`num_groups` more are generated in the block. These spans may overlap."""
        self._pass_time()
        self._running += num_groups
        try:
            if self._path is None:
                yield
            else:
                with self.overlapping(GENERATION, "group", name, group=name):
                    yield
        finally:
            self._pass_time()
            self._running -= num_groups

    @contextmanager
    def scoring(self) -> Generator[None]:
        """One more group is scored in the block: where nothing is generated beside, the loop waits for rewards."""
        self._pass_time()
        self._scoring += 1
        try:
            yield
        finally:
            self._pass_time()
            self._scoring -= 1

    @contextmanager
    def overlapping(self, track: str, name: str, key: str, **details: object) -> Generator[None]:
        """Draw the block on `track` as a span that may overlap others; `key` is unique among those of its time."""
        event = {"cat": track, "id": key, "name": name}
        self._event(track, ph="b", **event, ts=_us(now_s()), args=details)
        try:
            yield
        finally:
            self._event(track, ph="e", **event, ts=_us(now_s()))

    def past(self, track: str, name: str, seconds: float, **details: object) -> None:
        """Draw the last `seconds` on `track` as a span."""
        self._event(track, ph="X", name=name, ts=_us(now_s() - seconds), dur=_us(seconds), args=details)

    def count(self, name: str, value: float) -> None:
        """Draw `value` as a curve."""
        self._event(name, ph="C", name=name, ts=_us(now_s()), args={"value": value})

    def mark(self, track: str, name: str) -> None:
        """Draw an instant."""
        self._event(track, ph="i", s="p", name=name, ts=_us(now_s()))

    def tail(self, seconds: float) -> None:
        """Note that the trainer waited `seconds` for nothing but the slowest groups of its step."""
        self._tail_s += seconds

    @property
    def total_s(self) -> float:
        """Seconds between the first and the last thing noted."""
        return 0.0 if self._first_s is None else self._last_s - self._first_s

    def idle(self) -> list[Idle]:
        """Return who idled and why, the longest first, up to the last thing noted."""
        found = [
            Idle(who=who, cause=cause, seconds=seconds, total_s=self.total_s)
            for (who, cause), seconds in self._idle.items()
        ]
        if self._tail_s:
            found.append(Idle(who=TRAINER, cause=TAIL, seconds=self._tail_s, total_s=self.total_s))
        return sorted(found, key=lambda one: -one.seconds)

    def idle_seconds(self, who: str) -> float:
        """Return how long `who` (`TRAINER` or `GENERATION`) has idled, up to the last thing noted."""
        return sum(seconds for (name, _), seconds in self._idle.items() if name == who)

    def metrics(self) -> list[Metric]:
        """Return the idle ratios of the run so far."""
        total_s = self.total_s
        return [
            Metric(f"idle/{who}_fraction", Mean(self.idle_seconds(who) / total_s if total_s else 0.0))
            for who in (TRAINER, GENERATION)
        ]

    def sentence(self) -> str:
        """Name the largest cause of idle time and its share of the run."""
        causes = [one for one in self.idle() if one.cause != TAIL and one.share >= 0.005]
        if not causes:
            return "neither training nor generation had to wait"
        first = causes[0]
        waits = _TRAINER_WAITS if first.who == TRAINER else _GENERATION_WAITS
        sentence = f"{first.who} waited {first.share:.0%} of the steps' time {waits.get(first.cause, 'between steps')}"
        if first.who == TRAINER and first.cause == "generate" and self._tail_s >= 0.005 * self.total_s:
            sentence += (
                f", {self._tail_s / self.total_s:.0%} for the longest {TAIL_SHARE:.0%} of generations alone"
            )
        return sentence

    def close(self) -> None:
        """End the file, after which nothing is drawn; safe to call twice."""
        self._end()
        self._path = None

    def _pass_time(self) -> None:
        """Charge the time since the last change to whoever idled through it."""
        now = now_s()
        if self._first_s is None:
            self._first_s = now
        elif now > self._last_s:
            phase = self._phases[-1] if self._phases else ""
            if phase in ("generate", "drain") and self._scoring and not self._running:
                phase = "reward"
                self.rewards_s += now - self._last_s
            if phase != TRAINING:
                self._idle[TRAINER, phase] += now - self._last_s
            if self._running == 0:
                self._idle[GENERATION, phase] += now - self._last_s
        self._last_s = now

    def _event(self, track: str, **fields: object) -> None:
        if self._path is None:
            return
        if self._file is None:
            _before(self._path).unlink(missing_ok=True)
            self._file = self._begun(self._path)
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks) + 1
            name = {"ph": "M", "name": "thread_name", "pid": 1, "tid": self._tracks[track]}
            self._write(name | {"args": {"name": track}})
        self._write({"pid": 1, "tid": self._tracks[track], **fields})
        if self._num_bytes >= self._max_bytes:
            self._end()
            self._path.replace(_before(self._path))
            self._file = self._begun(self._path)

    def _begun(self, path: Path) -> IO[str]:
        file = path.open("w")
        file.write("[\n")
        self._tracks, self._num_bytes = {}, 0
        return file

    def _end(self) -> None:
        if self._file is not None:
            self._file.write("{}]\n")
            self._file.close()
            self._file = None

    def _write(self, event: Mapping[str, object]) -> None:
        assert self._file is not None
        self._num_bytes += self._file.write(json.dumps(event) + ",\n")


def _before(path: Path) -> Path:
    return path.with_stem(f"{path.stem}.before")


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


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
    `DeadlineExceeded` in the waiting task.
    """

    timeout_s: float = 600.0
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
            DeadlineExceeded: nothing moved for `timeout_s`; its text is the diagnosis.
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
