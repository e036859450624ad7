"""What the console writes, as plain values: formats, the columns of a step, the sample table, the closing panel."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from offbeat_trainer.data.types import Group

MAX_SAMPLES = 6
MISSING = "·"
BARS = "▁▂▃▄▅▆▇█"


def clock(seconds: float) -> str:
    """Return a duration as a person says it: 4.2 s, 3:05, 1:02:09."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Return about three significant digits in at most six characters, thousands as k and M."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit * 0.9995:
            return f"{value / unit:.1f}{name}" if size < unit * 99.5 else f"{value / unit:.0f}{name}"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 0.001 or value == 0:
        return f"{value:.3f}" if size < 10 else f"{value:.1f}"
    return f"{value:.0e}".replace("e-0", "e-")


def percent(value: float) -> str:
    """Return a fraction as percent with one digit."""
    return f"{value * 100:.1f}%" if math.isfinite(value) else str(value)


def seconds(value: float) -> str:
    """Return seconds with two digits below ten."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


@cache
def metrics_table() -> dict[str, Any]:
    """Return metrics.toml, the table of metrics, its columns and charts."""
    return tomllib.loads((files("offbeat_trainer") / "watch" / "metrics.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the table of steps: its `metrics`, of which a step shows the first that it has, with their titles.

    `always`: it is there before it has a value.
    """

    width: int
    metrics: Mapping[str, str]
    style: str = ""
    always: bool = False

    def key(self, *steps: Mapping[str, float]) -> str:
        """Return the metric that is shown of `steps`; "" where they have none."""
        return next((key for key in self.metrics if any(key in values for values in steps)), "")

    def title(self, values: Mapping[str, float]) -> str:
        """Return what the metric that a step with `values` shows is called; the last one's title where it has none."""
        return self.metrics.get(self.key(values), [*self.metrics.values()][-1])


STEP_TIMES = ("time/generate_s", "time/reward_s", "time/train_s", "time/sync_s")


def with_speed(values: Mapping[str, float], before_s: float = 0.0) -> dict[str, float]:
    """Return `values` with `tokens/generated_per_s`: tokens generated over the whole step, not over generation alone.

    `before_s` was spent between the step before and this one: its tokens are generated meanwhile.
    """
    step_s = before_s + sum(values.get(key, 0.0) for key in STEP_TIMES)
    tokens = values.get("tokens/generated")
    return (
        dict(values)
        if not step_s or tokens is None
        else {**values, "tokens/generated_per_s": tokens / step_s}
    )


def columns(values: Mapping[str, float], before: Sequence[Column] = ()) -> tuple[Column, ...]:
    """Return the columns of a run after a step with `values`; `before` it, it had those. None of them stays empty."""
    known = (Column(**one) for one in metrics_table()["column"])
    return tuple(column for column in known if column.always or column in before or column.key(values))


def header(values: Mapping[str, float], step_width: int, shown: Sequence[Column]) -> Text:
    """Return the line above the steps; columns are named by what `values` has."""
    titles = [f"{column.title(values):>{column.width}}" for column in shown]
    return Text("  ".join([f"{'step':>{step_width}}", *titles]), style="dim")


def row(step: int, values: Mapping[str, float], step_width: int, shown: Sequence[Column]) -> Text:
    """Return one step as a line."""
    line = Text(f"{step:>{step_width}}")
    for column in shown:
        key = column.key(values)
        text = _form(key)(values[key]) if key else MISSING
        line.append("  ")
        line.append(f"{text:>{column.width}}", style=column.style if key else "dim")
    return line


def trends(history: Sequence[Mapping[str, float]], step_width: int, shown: Sequence[Column]) -> Text:
    """Return the line below the steps: how each column went from the first to the last."""
    line = Text(" " * step_width)
    for column in shown:
        key = column.key(*history)
        bars = sparkline([values[key] for values in history if key in values], column.width)
        line.append("  ")
        line.append(f"{bars:>{column.width}}", style=column.style)
    return line


def sparkline(values: Sequence[float], width: int) -> str:
    """Return `values` as at most `width` bars between the smallest and the largest, means where there are more; "" for one alone."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    count = min(width, len(finite))
    ends = [len(finite) * at // count for at in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, spread = min(means), max(means) - min(means)
    return "".join(BARS[int((mean - low) / spread * (len(BARS) - 1)) if spread else 0] for mean in means)


def _form(key: str) -> Callable[[float], str]:
    return {"fraction": percent, "s": seconds}.get(_unit(key), number)


@cache
def _unit(key: str) -> str:
    known = (one for chart in metrics_table()["chart"] for one in chart["metrics"])
    return next((one["unit"] for one in known if fnmatchcase(key, one["key"])), "")


def visible(text: str) -> str:
    """Return `text` on one line: line ends as ⏎, what cannot be printed as its escape."""
    return "".join(
        "⏎" if char == "\n" else char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text.replace("\r\n", "\n")
    )


def sample_table(title: str, groups: Sequence[Group], texts: Sequence[Sequence[str]], width: int) -> Table:
    """Return up to `MAX_SAMPLES` completions, of as many prompts as possible, one line each."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    table.add_column("completion", no_wrap=True)
    table.add_column("reward", justify="right", no_wrap=True)
    room = max((width - 16) // 2, 8)
    for index in range(max(map(len, texts), default=0)):
        for group, group_texts in zip(groups, texts, strict=True):
            if index < len(group_texts) and table.row_count < MAX_SAMPLES:
                _add_sample(table, group, index, group_texts[index], room)
    return table


def _add_sample(table: Table, group: Group, index: int, text: str, room: int) -> None:
    prompt, completion = visible(group.prompt.text), visible(text)
    if len(prompt) > room:
        prompt = "…" + prompt[1 - room :]  # the end of a prompt is what was answered
    if len(completion) > room:
        completion = completion[: room - 1] + "…"
    mark = Text(MISSING, style="dim")
    if group.scores:
        score = group.scores[index]
        sign, style = {True: (" ✓", "green"), False: (" ✗", "red"), None: ("", "")}[score.correct]
        mark = Text(f"{number(score.reward)}{sign}", style=style)
    # Text, not str: a completion that looks like markup is not markup.
    table.add_row(Text(prompt, style="dim"), Text(completion), mark)


def summary_panel(values: Mapping[str, object]) -> Panel:
    """Return the closing panel: what was reached and what it cost; absent values are left out."""
    grid = Table.grid(padding=(0, 3))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _lines(values):
        grid.add_row(label, text)
    for label, result in cast("Mapping[str, str]", values.get("results") or {}).items():
        grid.add_row(label, Text(result))
    ended, style = "done", "green"
    if values.get("error"):
        ended, style = "failed", "red"
    elif values.get("interrupted"):
        ended, style = "stopped", "yellow"
    title = Text(f" {ended} ", style=f"bold {style}")
    return Panel(grid, title=title, title_align="left", border_style=style, padding=(1, 2), expand=False)


def where_next(values: Mapping[str, object]) -> list[Text]:
    """Return the lines below the panel: where to look next, and commands, which must be copied whole."""
    lines = {
        label: str(path) for label, path in cast("Mapping[str, object]", values.get("paths") or {}).items()
    }
    command = values.get("resume_command")
    if command and values.get("interrupted"):
        lines["to go on"] = str(command)
    width = max(map(len, lines), default=0)
    return [Text.assemble((f"{label:<{width}}  ", "dim"), (line, "cyan")) for label, line in lines.items()]


def _lines(values: Mapping[str, object]) -> list[tuple[str, Text]]:
    accuracy = _change(values, "accuracy_before", "accuracy_after", percent)
    held_out = _change(values, "validation_before", "validation_after", number)
    ends = ("before", "after")  # rewards may all be 0 or 1 at one end alone, by chance
    if any(
        values.get(f"accuracy_{end}") is None for end in ends if values.get(f"validation_{end}") is not None
    ):
        accuracy = None
    else:
        held_out = None
    lines = [
        ("failed", _said(values, "error")),
        ("accuracy", accuracy),
        ("held-out reward", held_out),
        ("reward", _change(values, "reward_first", "reward_last", number)),
        ("held-out loss", _change(values, "loss_before", "loss_after", number)),
        ("steps", _one(values, "steps", lambda value: f"{value:.0f}")),
        ("dropped", _given_up(values, "dropped_groups", "yellow")),
        ("left out", _given_up(values, "left_out_groups", "")),
        (
            "not scored",
            _mishap(values, {"unscored_completions": "completions", "unscored_prompts": "held-out prompts"}),
        ),
        ("wall", _wall(values)),
        ("speed", _one(values, "tokens_per_s", lambda value: f"{number(value)} tokens/s")),
        ("per step", _phases(values)),
        ("beside steps", _beside(values)),
        ("weight sync", _one(values, "sync_gb_per_s", lambda value: f"{number(value)} GB/s")),
        (
            "in syncs",
            _mishap(
                values, {"sync_failures": "failed and tried again", "fenced_members": "without a replica"}
            ),
        ),
        ("lost replicas", _lost_replicas(values)),
        (
            "max |Δ log-prob|",
            _one(values, "max_abs_logprob_diff", lambda value: f"{value:.1e} sampler, trainer"),
        ),
        ("waiting", _said(values, "where_time_went")),
        ("advice", _said(values, "advice")),
        ("not written", _lost(values)),
    ]
    return [(label, text) for label, text in lines if text is not None]


def _one(values: Mapping[str, object], key: str, form: Callable[[float], str]) -> Text | None:
    value = values.get(key)
    return Text(form(value)) if isinstance(value, int | float) else None


def _said(values: Mapping[str, object], key: str) -> Text | None:
    value = values.get(key)
    return Text("\n".join(map(visible, value.splitlines()))) if isinstance(value, str) and value else None


def _given_up(values: Mapping[str, object], key: str, style: str) -> Text | None:
    """Say how many groups were given up and why: what is left is no sample of all prompts any more."""
    by_reason = {
        reason.replace("_", " "): count
        for reason, count in cast("Mapping[str, float]", values.get(key) or {}).items()
        if count
    }
    if not by_reason:
        return None
    reasons = ", ".join(f"{reason} {count:.0f}" for reason, count in by_reason.items())
    total = sum(by_reason.values())
    return Text(f"{total:.0f} groups for {values.get('trained_groups', 0)} trained: {reasons}", style=style)


def _lost_replicas(values: Mapping[str, object]) -> Text | None:
    """Say how many replicas were lost, and of the newest why."""
    lost = cast("Sequence[str]", values.get("lost_replicas") or [])
    newest = "\n".join(visible(one) for one in lost[-MAX_SAMPLES:])
    return Text(f"{len(lost)}; the newest:\n{newest}", style="yellow") if lost else None


def _mishap(values: Mapping[str, object], words: Mapping[str, str]) -> Text | None:
    """Say how often each thing went wrong."""
    counts = {word: cast("float", values.get(key) or 0) for key, word in words.items()}
    said = ", ".join(f"{count:.0f} {word}" for word, count in counts.items() if count)
    return Text(said, style="yellow") if said else None


def _change(values: Mapping[str, object], first: str, last: str, form: Callable[[float], str]) -> Text | None:
    before, after = _one(values, first, form), _one(values, last, form)
    if before is None or after is None:
        return after or before
    return Text.assemble(before, ("  →  ", "dim"), (after.plain, "bold"))


def _wall(values: Mapping[str, object]) -> Text | None:
    wall = _one(values, "wall_s", clock)
    parts = [
        (name, _one(values, key, clock)) for name, key in (("start", "startup_s"), ("warm-up", "warmup_s"))
    ]
    inner = ", of which ".join(f"{name} {text.plain}" for name, text in parts if text is not None)
    return wall if wall is None or not inner else Text.assemble(wall, (f"  ({inner})", "dim"))


def _phases(values: Mapping[str, object]) -> Text | None:
    phases = values.get("phase_s")
    if not phases:
        return None
    each = cast("Mapping[str, float]", phases).items()
    return Text(" · ".join(f"{name} {seconds(value)} s" for name, value in each if value)) or None


def _beside(values: Mapping[str, object]) -> Text | None:
    each = cast("Mapping[str, float]", values.get("beside_s") or {}).items()
    return Text(" · ".join(f"{name} {clock(value)}" for name, value in each if value >= 1)) or None


def _lost(values: Mapping[str, object]) -> Text | None:
    lost = cast("Mapping[str, int]", values.get("reports_lost") or {})
    return (
        Text(", ".join(f"{name}: {count}" for name, count in lost.items()), style="yellow") if lost else None
    )
