#!/usr/bin/env python3
"""Reward of several runs side by side, by step and by wall time, as Markdown.

    uv run tools/bench/curves.py sync=runs/sync-0,runs/sync-1 fully_async=runs/async-0,runs/async-1

Each argument is a name and the run folders that count as one curve: their rewards are averaged, over a window of
`--window` steps. Time begins with the first step, so that starting up and warming up do not count. Printed are a table of what each run came
to and two charts for a viewer that knows Mermaid. The exit code is 1 if a folder holds no finished run.
"""

from __future__ import annotations

import argparse
import bisect
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished run: its summary, and reward and seconds by step."""

    folder: Path
    summary: dict[str, Any]
    rewards: list[float]
    seconds: list[float]

    def at(self, index: int, window: int) -> float:
        """Return the mean reward of the `window` steps around step `index` (from 0)."""
        return fmean(self.rewards[max(0, index - window // 2) : index + window // 2 + 1])


def read(folder: Path) -> Run:
    """Return the run in `folder`; `FileNotFoundError` where it has not ended."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Run(
        folder=folder,
        summary=summary,
        rewards=[line["reward/mean"] for line in lines],
        seconds=[line["time_s"] - lines[0]["time_s"] for line in lines],
    )


def by_step(runs: list[Run], every: int, window: int) -> list[float]:
    """Return the averaged reward at each `every`-th step."""
    length = min(len(run.rewards) for run in runs)
    return [fmean(run.at(step - 1, window) for run in runs) for step in range(every, length + 1, every)]


def by_time(runs: list[Run], every_s: float, until_s: float, window: int) -> list[float]:
    """Return the averaged reward of the step that was done last at each moment; a run that has ended keeps its last one."""
    moments = [every_s * count for count in range(round(until_s / every_s) + 1)]
    return [
        fmean(run.at(bisect.bisect_right(run.seconds, moment) - 1, window) for run in runs)
        for moment in moments
    ]


def chart(title: str, axis: str, places: list[float], curves: dict[str, list[float]]) -> str:
    """Return a chart with one line a curve, in the order of `curves`."""
    lines = [
        "```mermaid",
        "xychart-beta",
        f'    title "{title}: {", ".join(curves)}"',
        f'    x-axis "{axis}" [{", ".join(f"{place:g}" for place in places)}]',
        '    y-axis "mean reward" 0.4 --> 1.0',
        *(f"    line [{', '.join(f'{value:.3f}' for value in values)}]" for values in curves.values()),
        "```",
    ]
    return "\n".join(lines)


def table(curves: dict[str, list[Run]]) -> str:
    """Return what each run came to."""
    rows = [
        "| curve | run | accuracy before | after | steps | seconds of them |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in curves.items():
        rows += [
            f"| {name} | {run.folder.name} | {run.summary['accuracy_before']:.1%} | {run.summary['accuracy_after']:.1%} "
            f"| {len(run.rewards)} | {run.seconds[-1]:.0f} |"
            for run in runs
        ]
    return "\n".join(rows)


def main() -> int:
    """Print table and charts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("curves", nargs="+", metavar="NAME=FOLDER,..")
    parser.add_argument("--window", type=int, default=5, help="steps that are averaged")
    parser.add_argument("--every", type=int, default=5, help="steps, and seconds, from point to point")
    options = parser.parse_args()
    curves: dict[str, list[Run]] = {}
    for argument in options.curves:
        name, _, folders = argument.partition("=")
        try:
            curves[name] = [read(Path(folder)) for folder in folders.split(",")]
        except (FileNotFoundError, KeyError) as error:
            print(f"{argument}: expected NAME=FOLDER,.. of finished runs: {error!r}", file=sys.stderr)
            return 1
    print(table(curves))
    steps = {name: by_step(runs, options.every, options.window) for name, runs in curves.items()}
    shortest = min(len(values) for values in steps.values())
    places = [float(options.every * (count + 1)) for count in range(shortest)]
    print(
        "\n" + chart("By step", "step", places, {name: values[:shortest] for name, values in steps.items()})
    )
    until_s = max(run.seconds[-1] for runs in curves.values() for run in runs)
    times = {name: by_time(runs, options.every, until_s, options.window) for name, runs in curves.items()}
    moments = [float(options.every * count) for count in range(len(next(iter(times.values()))))]
    print("\n" + chart("By wall time", "seconds since the first step", moments, times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
