"""Metrics of a run: unit, what each means, what is usual, and the chart that shows it.

The table is offbeat_trainer/watch/metrics.toml; the report and docs/metrics.md are made from it, and from what modules say with
`offbeat_trainer.data.metrics.described` of those that are drawn alone.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

from offbeat_trainer.watch.figures import metrics_table

if TYPE_CHECKING:
    from collections.abc import Sequence


class Section(StrEnum):
    """The question of the report that a chart helps to answer."""

    LEARN = "learn"
    HEALTH = "health"
    TIME = "time"


class Kind(StrEnum):
    """How a chart is drawn: lines, lines over a logarithmic axis, or areas that add up."""

    LINES = "lines"
    LOG = "log"
    STACK = "stack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One metric, or all whose keys fit the pattern `key`.

    `low` and `high` bound what is usual, where that is the same for most runs. Those that are not `drawn` are
    for other readers.
    """

    key: str
    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    drawn: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Metrics that are read together, in one unit; `usual` and `advice` are sentences."""

    title: str
    section: Section
    usual: str
    advice: str = ""
    kind: Kind = Kind.LINES
    metrics: tuple[Known, ...]


def _read() -> tuple[Chart, ...]:
    return tuple(
        Chart(
            title=chart["title"],
            section=Section(chart["section"]),
            usual=chart["usual"],
            advice=chart.get("advice", ""),
            kind=Kind(chart.get("kind", Kind.LINES)),
            metrics=tuple(Known(**known) for known in chart["metrics"]),
        )
        for chart in metrics_table()["chart"]
    )


CHARTS = _read()


@cache
def lookup(key: str) -> tuple[Chart, Known] | None:
    """Return the chart and the entry of the metric `key`, the exact one before patterns.

    None: it is in no chart.
    """
    entries = [(chart, known) for chart in CHARTS for known in chart.metrics]
    exact = [entry for entry in entries if entry[1].key == key]
    fitting = [entry for entry in entries if fnmatchcase(key, entry[1].key)]
    return next(iter([*exact, *fitting]), None)


def label_of(key: str, known: Known) -> str:
    """Return what a chart calls the metric: what `*` stands for, or its key without area and unit."""
    start, star, end = known.key.partition("*")
    if star:
        return key.removeprefix(start).removesuffix(end).replace("_", " ")
    return key.partition("/")[2].removesuffix("_fraction").removesuffix("_nats").replace("_", " ")


def out_of_range(known: Known, values: Sequence[float | None]) -> float | None:
    """Return the median of the last quarter of `values` if that is not what is usual; else None."""
    finite = [value for value in values if value is not None]
    if not finite or (known.low is None and known.high is None):
        return None
    newest = statistics.median(finite[-max(1, len(finite) // 4) :])
    too_low = known.low is not None and newest < known.low
    too_high = known.high is not None and newest > known.high
    return newest if too_low or too_high else None
