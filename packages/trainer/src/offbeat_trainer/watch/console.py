"""What a person sees of a run: phases, a live line, one row per step, a few completions, a closing panel."""

from __future__ import annotations

import builtins
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.watch.fanout import Screen
from offbeat_trainer.watch.figures import (
    clock,
    columns,
    header,
    row,
    sample_table,
    summary_panel,
    trends,
    where_next,
    with_speed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import RenderableType

    from offbeat_trainer.data.metrics import Metric
    from offbeat_trainer.data.types import Group
    from offbeat_trainer.watch.figures import Column

FIRST_OF_STEP = ("generate", "train")
NEWS = ("stopping", "fenced", "failing", "dropped")
"""Phases that leave a line in the middle of steps, too: the next one comes at once."""
BETWEEN_STEPS = ("validate", "evaluate", "save")
"""Phases that are no part of a step."""
SAMPLED = "sampled"
HEADER_EVERY = 30
PLAIN_DETAIL_EVERY_S = 15.0
REFRESH_PER_S = 4
PHASE_WIDTH = 10
PIPE_WIDTH = 100


@dataclass(slots=True)
class _Phase:
    """A phase that is on. `share` of it is done; `usual_s` is how long it took last time, 0 where it is the first."""

    name: str
    detail: str
    started: float
    usual_s: float
    share: float = 0.0

    def left(self, now: float) -> str:
        """Return about how long it still takes, in words; "" where nothing tells."""
        spent = now - self.started
        left = spent / self.share - spent if self.share else self.usual_s - spent
        return f"about {clock(left)} left" if left >= 1 else ""


class _Cell:
    """The live line in a notebook: one output, which is written anew."""

    def __init__(
        self, show: Callable[..., Any], render: Callable[[], RenderableType], console: Console
    ) -> None:
        self._render, self._console = render, console
        self._shown_s = 0.0
        self._output = show(self._text(), raw=True, display_id=True)

    def refresh(self) -> None:
        """Show what is, at most `REFRESH_PER_S` times a second."""
        if time.monotonic() - self._shown_s >= 1 / REFRESH_PER_S:
            self._shown_s = time.monotonic()
            self._output.update(self._text(), raw=True)

    def stop(self) -> None:
        """Take it away."""
        self._output.update({"text/plain": ""}, raw=True)

    def _text(self) -> dict[str, str]:
        with self._console.capture() as text:
            self._console.print(self._render())
        return {"text/plain": text.get().rstrip()}


class ConsoleReporter:
    """A `Reporter` for people.

    Until the first "generate", or "train" where nothing is generated, every phase leaves one line with its time; from then on phases show only in the live
    line at the bottom, and each step leaves one row. The same phase announced again with another detail is progress
    within it, or what it waits for. How long one still takes is told by its `progress`, or by how long it took last time. In a
    notebook the live line is an output of its own above them. Where standard output is no terminal there is no live line: startup phases are printed
    as they begin, what is announced within a phase at most every 15 s, rows as they come.

    Completions titled "sampled" (those of the middle of a run) are for the files, not for the screen.
    """

    def __init__(
        self,
        *,
        title: str = "",
        steps: int = 0,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write to `console` (None = standard output).

        Args:
            title: shown once, at the top.
            steps: the run's last step, for the bar and the estimate; 0 = unknown.
            console: a rich console.
            now: a clock in seconds.
        """
        self._console = _standard_output() if console is None else console
        self._now = now
        self._title = title
        self._steps = steps
        self._opened = self._now()
        self._phase: _Phase | None = None
        self._in_steps = False
        self._steps_started = 0.0
        self._step = 0
        self._rows = 0
        self._history: list[dict[str, float]] = []  # of the columns
        self._columns: tuple[Column, ...] = ()
        self._validate_s = 0.0  # after the newest step
        self._said = self._opened
        self._held: list[RenderableType] = []
        self._ended = False
        self._spinner = Spinner("dots", style="cyan")
        self._lasted: dict[str, float] = {}  # seconds, by phase
        self._live: Live | _Cell | None = None

    def phase(self, name: str, detail: str = "") -> None:
        """Show that the run is in `name` now."""
        now = self._now()
        self._open()
        if self._phase is not None and self._phase.name == name:
            self._phase.detail = detail
            if now - self._said >= PLAIN_DETAIL_EVERY_S:
                self._say_plain(name, detail, now)
            self._refresh()
            return
        self._close_phase(now)
        if name in FIRST_OF_STEP and not self._in_steps:
            self._in_steps, self._steps_started = True, now
        self._phase = _Phase(name, detail, now, self._lasted.get(name, 0.0))
        if not self._in_steps:
            self._say_plain(name, detail, now)
        elif name in NEWS:
            self._line(Text(f"{name}: {detail}"))
        self._refresh()  # or the phase that just ended would stay below its own line for a moment

    def progress(self, done: int, total: int) -> None:
        """Show that of the phase that is on `done` of `total` parts are done."""
        if self._phase is not None:
            self._phase.share = done / total

    def metrics(self, step: int, metrics: Sequence[Metric]) -> None:
        """Print a finished step as a row."""
        self._open()
        values = with_speed(reduce_metrics(metrics), self._validate_s)
        self._validate_s = values.get("time/validate_s", 0.0)
        width = max(4, len(str(self._steps)))
        shown = columns(values, self._columns)
        if self._rows % HEADER_EVERY == 0 or shown != self._columns:
            self._columns = shown
            self._line(Text())
            self._line(header(values, width, shown))
        self._rows += 1
        self._step = step
        self._history.append({key: values[key] for one in shown for key in one.metrics if key in values})
        self._line(row(step, values, width, self._columns))
        self._show_held()
        self._refresh()

    def samples(self, step: int, title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]]) -> None:
        """Show a few completions; those of a step that is not finished come below its row."""
        if title == SAMPLED:
            return
        width = min(self._console.width, 110)
        self._held.append(sample_table(f"Samples {title} (step {step})", groups, texts, width))
        if not self._in_steps:
            self._close_phase(self._now())
            self._show_held()

    def summary(self, values: Mapping[str, object]) -> None:
        """Print what the run came to.

        Shown: accuracy_before/_after, or validation_before/_after where there is none, reward_first/_last, steps,
        wall_s, startup_s, warmup_s, tokens_per_s, phase_s, sync_gb_per_s, max_abs_logprob_diff; `interrupted` with `resume_command`; `results`, more figures in words
        by label; and `paths`, a mapping from label to where to look next. Other values are for `summary.json`.
        """
        self._ended = True
        self._stop_live()
        self._show_held()
        if self._rows > 1:
            self._line(trends(self._history, max(4, len(str(self._steps))), self._columns))
        self._console.print(Text())
        self._console.print(summary_panel(values))
        for line in where_next(values):
            self._line(line)

    def close(self) -> None:
        """Give the screen back; without a summary, say in which phase the run ended."""
        self._stop_live()
        self._show_held()
        if not self._ended and self._phase is not None:
            spent = clock(self._now() - self._phase.started)
            words = f" {self._phase.detail}" if self._phase.detail else ""
            self._line(
                Text.assemble(
                    ("✗ ", "red"), f"ended in {self._phase.name}{words}", (f"  after {spent}", "dim")
                )
            )
        self._ended = True

    def _open(self) -> None:
        if self._title:
            self._console.print(Text.assemble(("offbeat", "bold cyan"), ("  ·  ", "dim"), self._title))
            self._console.print(Text())
            self._title = ""
        if self._live is not None or self._ended:
            return
        if self._console.is_jupyter and (show := vars(builtins).get("display")):  # which IPython puts there
            self._live = _Cell(show, self._status, self._console)
        elif self._console.is_terminal:
            # Transient: at the end the line goes, and the rows above it are all that stays.
            self._live = Live(
                get_renderable=self._status,
                console=self._console,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
            )
            self._live.start()

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _close_phase(self, now: float) -> None:
        """Leave a line about the startup phase that ends now."""
        phase, self._phase = self._phase, None
        if phase is not None:
            self._lasted[phase.name] = now - phase.started
        if phase is None or self._in_steps or not self._console.is_terminal:
            return
        self._line(
            Text.assemble(
                ("✓ ", "green"),
                f"{phase.name:<{PHASE_WIDTH}}",
                (f"{clock(now - phase.started):>8}", "cyan"),
                (f"   {phase.detail}", "dim"),
            )
        )

    def _say_plain(self, name: str, detail: str, now: float) -> None:
        if self._console.is_terminal:
            return
        self._said = now
        text = _joined(detail, "" if self._phase is None else self._phase.left(now))
        self._line(Text(f"{'+' + clock(now - self._opened):>9}  {name:<{PHASE_WIDTH}} {text}".rstrip()))

    def _line(self, text: Text) -> None:
        # Soft wrap: a pipe has no width, and a narrow terminal may break the line but not lose its end.
        self._console.print(text, soft_wrap=True)

    def _show_held(self) -> None:
        for table in self._held:
            self._console.print(Text())
            self._console.print(table)
        self._held.clear()

    def _status(self) -> RenderableType:
        """Return the live line. Called from rich's own thread: it reads, and changes nothing."""
        now, phase = self._now(), self._phase
        grid = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [self._spinner]
        if phase is None:
            cells.append(Text("…", style="dim"))
        elif not self._in_steps:
            cells += [
                Text(f"{phase.name:<{PHASE_WIDTH - 1}}"),
                Text(f"{clock(now - phase.started):>8}", style="cyan"),
                *([ProgressBar(total=1, completed=phase.share, width=24)] if phase.share else []),
                Text(
                    f" {_joined(phase.left(now), phase.detail)}",
                    style="dim",
                    no_wrap=True,
                    overflow="ellipsis",
                ),
            ]
        else:
            left = phase.left(now) if phase.name in BETWEEN_STEPS else ""
            cells += [
                *self._progress(phase, now),
                Text(
                    _joined(left and f"{phase.name}: {left}", phase.detail),
                    style="dim",
                    no_wrap=True,
                    overflow="ellipsis",
                ),
            ]
        grid.add_row(*cells)
        return grid

    def _progress(self, phase: _Phase, now: float) -> list[RenderableType]:
        spent = now - self._steps_started
        cells: list[RenderableType] = [Text(f"{phase.name:<{PHASE_WIDTH - 1}}")]
        if self._steps:
            left = spent / self._rows * max(self._steps - self._step, 0) if self._rows else None
            cells += [
                ProgressBar(total=self._steps, completed=self._step, width=24),
                Text(f"{self._step}/{self._steps}"),
                Text(clock(spent), style="cyan"),
                Text("" if left is None else f"about {clock(left)} left", style="dim"),
            ]
        else:
            cells += [Text(f"step {self._step + 1}"), Text(clock(spent), style="cyan")]
        return cells


def _joined(*words: str) -> str:
    return "; ".join(filter(None, words))


def _standard_output() -> Console:
    console = Console(highlight=False, file=cast("TextIO", Screen(sys.stdout)))
    if not console.is_terminal:
        console.width = PIPE_WIDTH  # a pipe has none of its own, and rich would take 80
    return console
