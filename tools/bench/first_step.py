#!/usr/bin/env python3
"""Seconds from the start of `offbeat train` to its first step: to the first line of metrics.jsonl.

    uv run tools/bench/first_step.py --json

The run is that of `tools/demo` without its supervised warm-up, whose length is a setting: model and tokenizer are made,
processes start, the policy is validated once, and one step is made. A first run of each adapter, which reads files from
the disk, does not count; the figures are medians. Progress goes to stderr, with --json the last line of stdout is one
JSON object. The exit code is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from runner import BenchError, guarded, say, started, tail

TIMEOUT_S = 600.0
ADAPTERS = ("vllm", "hf")


def first_step(adapter: str, folder: Path) -> float:
    """Return the seconds that a run in `folder` takes to its first line of metrics.

    Raises:
        BenchError: there was none within `TIMEOUT_S`, or the run ended before.
    """
    settings = [
        "task=arithmetic",
        f"rollout={adapter}",
        "warmup.steps=0",
        "trainer.steps=1",
        f"run_dir={folder}",
    ]
    metrics, log = folder / "metrics.jsonl", folder.with_suffix(".log")
    with log.open("wb") as output:
        mark = time.perf_counter()
        with started([sys.executable, "-m", "offbeat_recipes.cli.train", *settings], output) as process:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None or time.perf_counter() - mark > TIMEOUT_S:
                    raise BenchError(f"no first step with rollout={adapter}: {tail(log)}")
                time.sleep(0.01)
            took_s = time.perf_counter() - mark
            process.wait(TIMEOUT_S)
    return took_s


def main() -> int:
    """Measure what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--adapters", default=",".join(ADAPTERS), help="by commas")
    parser.add_argument("--repeats", type=int, default=3, help="runs that count, after a first one")
    parser.add_argument("--smallest", action="store_true", help="one run, the first: a check, no figures")
    options = parser.parse_args()
    machine = {"cores": len(os.sched_getaffinity(0)), "load_before": round(os.getloadavg()[0], 2)}
    runs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as scratch:
        for adapter in options.adapters.split(","):
            took = [
                first_step(adapter, Path(scratch) / f"{adapter}{number}")
                for number in range(1 if options.smallest else options.repeats + 1)
            ]
            runs[adapter] = took if options.smallest else took[1:]
            say(f"{adapter}: {' '.join(f'{each:.2f}' for each in took)} s")
    figures = {f"{adapter}_first_step_s": round(median(took), 2) for adapter, took in runs.items()}
    answer = {**figures, "runs": runs, "machine": machine}
    print(json.dumps(answer, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
