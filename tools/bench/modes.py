#!/usr/bin/env python3
"""What running off the beat gains, and what it costs.

    uv run tools/bench/modes.py --json

Four parts, one after the other; --only picks some of them:

  paced   a generator with log-normal lengths that takes no CPU, and real training: `utilisation` of the busier side
  real    vLLM and training of an 8.8 M model through `offbeat train` in each mode: `tokens_per_s`, `async_over_sync`
  driver  the driver alone: `driver_us_per_sample` with 10,000 groups in flight, `ready_to_consumed_p99_ms`;
          `driver_us_per_token` with completions of 8,192 tokens
  rewards 256 completions, rewards of 100 ms each: `sleep_s`, `cpu_s`, `async_s` of a step

`journal_share` of a step is the larger of those that `paced` and `real` found. Progress goes to stderr. With --json the
last line of stdout is one JSON object. The exit code is 1 if a part could not be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from runner import BenchError, guarded, say

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_STEPS = 8  # of a real run: two that count
PARTS = ("paced", "real", "driver", "rewards")


def _paced(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    import torch
    from modes_training import measure

    torch.set_num_threads(1)  # the driver shares this process, as it does not in a run: leave it a core
    return asyncio.run(measure(folder, options.paced_steps, smallest=options.smallest))


def _real(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    from modes_real import Runs, measure

    runs = Runs(
        adapter=options.rollout,
        lengths=options.lengths,
        steps=options.steps,
        threads=options.threads,
        layouts=options.layouts,
        smallest=options.smallest,
    )
    return measure(folder, runs, say)


def _driver(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    from modes_driver import GROUP_S, measure, measure_tokens

    group_s = 0.1 if options.smallest else GROUP_S
    return {
        **asyncio.run(measure(folder / "many", options.in_flight, options.driver_steps, group_s)),
        **asyncio.run(measure_tokens(folder / "long", options.token_steps)),
    }


def _rewards(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    from modes_rewards import measure

    return asyncio.run(measure(folder, smallest=options.smallest))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure, by commas")
    parser.add_argument(
        "--paced-steps", type=int, default=80, help="steps of the fully asynchronous paced run"
    )
    parser.add_argument("--steps", type=int, default=16, help="of each real run")
    parser.add_argument(
        "--layouts", choices=["pools", "usual", "all"], default="all", help="of real runs: the best counts"
    )
    parser.add_argument(
        "--lengths", choices=["spread", "equal"], default="spread", help="of real completions"
    )
    parser.add_argument("--rollout", default="vllm", help="adapter of real runs")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores of real runs"
    )
    parser.add_argument("--in-flight", type=int, default=10_000, help="groups, for the driver")
    parser.add_argument("--driver-steps", type=int, default=120, help="of 250 groups each, counted")
    parser.add_argument("--token-steps", type=int, default=20, help="of 32 completions of 8,192 tokens each")
    parser.add_argument("--keep", metavar="FOLDER", help="keep models, logs and run folders there")
    parser.add_argument(
        "--smallest", action="store_true", help="as little as runs every part: a check, no figures"
    )
    options = parser.parse_args()
    if options.smallest:
        options.paced_steps, options.steps, options.layouts, options.threads = 0, LEAST_STEPS, "pools", 1
        options.in_flight, options.driver_steps, options.token_steps = 500, 2, 1
    options.only = [name for name in options.only.split(",") if name]
    unknown = set(options.only) - set(PARTS)
    if unknown:
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if options.in_flight < 500 or options.in_flight % 250:
        parser.error(f"--in-flight: expected a multiple of 250, at least 500, got {options.in_flight}")
    if options.keep and Path(options.keep).exists():
        parser.error(f"--keep: expected a folder that is not there yet, got {options.keep}")
    return options


def main() -> int:
    """Measure what the command line asks for; return the exit code."""
    options = _options()
    load = os.getloadavg()[0]
    scratch = Path(options.keep or tempfile.mkdtemp(prefix="offbeat-modes-")).absolute()
    parts: dict[str, Callable[[argparse.Namespace, Path], dict[str, object]]] = {
        "paced": _paced,
        "real": _real,
        "driver": _driver,
        "rewards": _rewards,
    }
    answer: dict[str, object] = {}
    failed: list[str] = []
    try:
        for name in options.only:
            started = time.perf_counter()
            say(f"{name} ...")
            folder = scratch / name
            folder.mkdir(parents=True)
            try:
                found = parts[name](options, folder)
            except BenchError as error:
                failed.append(f"{name}: {str(error).splitlines()[0]}")
                say(f"  failed: {error}")
                continue
            answer |= found
            say(f"  {json.dumps(found)} ({time.perf_counter() - started:.0f} s)")
    finally:
        if not options.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    shares = [float(str(value)) for key, value in answer.items() if key.startswith("journal_share")]
    if shares:
        answer["journal_share"] = max(shares)
    answer["machine"] = {"cores": len(os.sched_getaffinity(0)), "load_before": round(load, 2)}
    if failed:
        answer["failed"] = failed
    print(json.dumps(answer, indent=None if options.json else 2))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
