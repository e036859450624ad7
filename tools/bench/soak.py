#!/usr/bin/env python3
"""A long fully asynchronous run: do the driver's memory, open files and threads stay flat?

    uv run tools/bench/soak.py --steps 2000 --json

The run is the command that people type, with its real Ray, ranks and replicas. Every step its driver, and the ranks and
replicas together, are looked at from outside, in /proc. Progress goes to stderr; with --json the last line of stdout is one
JSON object: medians right after the first `--settle` steps and at the end, what a thousand steps add between (a robust
line through all looks, Theil and Sen), and what was found at step `--settle`, half-way and at the end. The exit code is 1 if the run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos_account import steps_on_record
from runner import BenchError, guarded, started, tail

STEP_TIMEOUT_S = 600.0
SHARE = 10  # medians are over a tenth of all looks, at either end
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look has found: anonymous memory (what a process has allocated itself), files and threads."""

    step: int
    driver_mib: float
    driver_files: int
    driver_threads: int
    workers_mib: float
    workers_files: int
    workers_threads: int


def look_at(driver: int, folder: Path, step: int) -> Look:
    """Look at the driver and at those processes that write a log into the run folder."""
    logs = str((folder / "logs").absolute()) + "/"
    workers = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _writes(pid, logs)]
    mib, files, threads = _used(driver)
    others = [_used(pid) for pid in workers if pid != driver]
    return Look(
        step=step,
        driver_mib=mib,
        driver_files=files,
        driver_threads=threads,
        workers_mib=sum(one[0] for one in others),
        workers_files=sum(one[1] for one in others),
        workers_threads=sum(one[2] for one in others),
    )


def _used(pid: int) -> tuple[float, int, int]:
    """Return MiB of anonymous memory, open files and threads of a process; zeros where it has gone."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0.0, 0, 0
    if "RssAnon" not in status:  # it has ended, and nobody has asked for its exit code yet
        return 0.0, 0, 0
    return int(status["RssAnon"].split()[0]) * 1024 / MIB, files, int(status["Threads"])


def _writes(pid: int, logs: str) -> bool:
    try:
        return any(
            os.readlink(f"/proc/{pid}/fd/{fd}").startswith(logs) for fd in os.listdir(f"/proc/{pid}/fd")
        )
    except OSError:
        return False


def run(options: argparse.Namespace, folder: Path) -> tuple[list[Look], float]:
    """Run to the end, looking at every new step; return the looks and the seconds."""
    settings = {
        "task": "arithmetic",
        "mode": "fully_async",
        "rollout": options.rollout,
        "run_dir": folder,
        "warmup.steps": 10,
        "trainer.steps": options.steps,
        "trainer.prompts_per_step": 4,
        "trainer.group_size": 4,
        "trainer.save_every": 200,
        "trainer.validate_every": 0,
        "trainer.validation_prompts": 1,
        "report.console": "false",
    }
    command = [sys.executable, "-m", "offbeat_recipes.cli.train", *(f"{k}={v}" for k, v in settings.items())]
    looks: list[Look] = []
    started_s = moved_s = time.monotonic()
    with folder.with_suffix(".log").open("ab") as output, started(command, output) as process:
        while process.poll() is None:
            done = len(steps_on_record(folder))
            if done > (looks[-1].step if looks else 0):
                looks.append(look_at(process.pid, folder, done))
                moved_s = time.monotonic()
                if len(looks) % 100 == 1:
                    print(looks[-1], file=sys.stderr, flush=True)
            elif time.monotonic() - moved_s > STEP_TIMEOUT_S:
                raise BenchError(f"no step for {STEP_TIMEOUT_S:g} s:\n{tail(folder.with_suffix('.log'))}")
            time.sleep(options.poll_s)
    if process.returncode != 0 or not looks:
        raise BenchError(f"the run ended with {process.returncode}:\n{tail(folder.with_suffix('.log'))}")
    return looks, time.monotonic() - started_s


def summary(looks: list[Look], settle: int) -> dict[str, object]:
    """Return, by figure, medians at both ends after the first `settle` steps and the slope between."""
    settled = [look for look in looks if look.step > settle]
    if len(settled) < 2 * SHARE:
        raise BenchError(f"only {len(settled)} looks after step {settle}; use more --steps")
    count = len(settled) // SHARE
    answer: dict[str, object] = {}
    for name in asdict(settled[0]):
        if name == "step":
            continue
        values = [(look.step, float(getattr(look, name))) for look in settled]
        thin = values[:: max(1, len(values) // 300)]
        slopes = [(b - a) / (t - s) for i, (s, a) in enumerate(thin) for t, b in thin[i + 1 :]]
        answer[name] = {
            "first": round(statistics.median(value for _, value in values[:count]), 1),
            "last": round(statistics.median(value for _, value in values[-count:]), 1),
            "per_1000_steps": round(1000 * statistics.median(slopes), 2),
        }
    return answer


def main() -> int:
    """Run, look, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--settle", type=int, default=200, help="steps before the first figure")
    parser.add_argument("--rollout", default="hf", help="adapter")
    parser.add_argument("--poll-s", type=float, default=0.5, help="seconds between two looks at the run")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the run folder there")
    options = parser.parse_args()
    base = Path(options.keep or tempfile.mkdtemp(prefix="offbeat-soak-"))
    base.mkdir(parents=True, exist_ok=True)
    try:
        looks, wall_s = run(options, base / "run")
        moments = (options.settle, options.steps // 2, options.steps)
        nearest = [min(looks, key=lambda look: abs(look.step - moment)) for moment in moments]
        answer = {
            **summary(looks, options.settle),
            "looks": [asdict(look) for look in nearest],
            "steps": looks[-1].step,
            "wall_s": round(wall_s, 1),
        }
    except BenchError as error:
        sys.exit(f"soak: {error}")
    finally:
        if not options.keep:
            shutil.rmtree(base, ignore_errors=True)
    print(json.dumps(answer) if options.json else json.dumps(answer, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
