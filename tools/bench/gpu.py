#!/usr/bin/env python3
"""What only a GPU can show, on a machine with one: the tests marked gpu, MFU, cuda_ipc between processes, a GRPO step.

    python tools/bench/gpu.py                     # under ten minutes
    python tools/bench/gpu.py --only train_7b --limit 200
    python tools/bench/gpu.py --list              # what the first hour on a GPU must run, in order

It needs torch, transformers, tensordict, lazy_loader, xxhash and, for adapters, peft; the packages of this checkout need not be
installed, and neither Ray nor vLLM is asked for. Every part runs in a process of its own within its own budget and what
is left of --limit. Progress goes to stderr; the last line of stdout is one JSON object. The exit code is 0, also where
parts were skipped for lack of a GPU, a package or time: `skipped` says why. It is 1 if a part that ran failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from gpu_first_hour import printed
from runner import git, guarded, say

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
PACKAGES = (
    "torch",
    "transformers",
    "tensordict",
    "peft",
    "xxhash",
    "numpy",
    "safetensors",
    "megatron-core",
    "transformer-engine",
    "triton",
    "flash-attn",
)
LIMIT_S = 530.0
LEAST_S = 20.0
"""A part is not begun with less: importing torch and making a model takes that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing to measure: the seconds it may take, and the modules it cannot do without. `tests`: a folder of tests."""

    name: str
    budget_s: float
    needs: tuple[str, ...] = ("tensordict", "transformers")
    tests: str = ""


# What says most comes first: what no time is left for is at the end.
PARTS = (
    Part(name="train_1_5b", budget_s=60),
    Part(name="train_1_5b_compiled", budget_s=80),
    Part(name="train_1_5b_8k", budget_s=60),
    Part(name="train_7b", budget_s=100, needs=("tensordict", "transformers", "peft")),
    Part(name="train_megatron", budget_s=50, needs=("tensordict", "transformers", "megatron")),
    Part(name="cuda_ipc", budget_s=40, needs=("xxhash",)),
    Part(name="grpo", budget_s=40, needs=("tensordict", "transformers", "xxhash", "rich")),
    Part(name="tests_engine", budget_s=150, needs=("pytest", "hypothesis", "tensordict", "peft"), tests="engine"),
    Part(name="tests_ckptsync", budget_s=50, needs=("pytest", "pytest_asyncio", "hypothesis", "xxhash"), tests="ckptsync"),
    Part(name="tests_rollout", budget_s=50, needs=("pytest", "pytest_asyncio", "hypothesis"), tests="rollout"),
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for, and print it."""
    options = _parser().parse_args(arguments)
    if options.list:
        print(printed())
        return 0
    if options.part:
        return _measure(options.part)
    started = time.monotonic()
    parts = [part for part in PARTS if part.name in options.only.split(",")]
    answer: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "--short=12", "HEAD") or None,
        "device": device(),
        "versions": versions(),
        "parts": {},
        "skipped": {},
        "failed": {},
    }
    for part in parts:
        budget_s = min(part.budget_s, options.limit - (time.monotonic() - started))
        reason = reason_to_skip(part, budget_s, answer["device"])
        if reason:
            say(f"{part.name}: skipped: {reason}")
            answer["skipped"][part.name] = reason
            continue
        say(f"{part.name}: at most {budget_s:.0f} s")
        begun = time.monotonic()
        found, failure = run_tests(part, budget_s) if part.tests else run_part(part.name, budget_s)
        found["wall_s"] = time.monotonic() - begun
        say(f"{part.name}: {failure or 'done'} ({found['wall_s']:.0f} s)")
        answer["parts"][part.name] = found
        if failure:
            answer["failed"][part.name] = failure
    answer["wall_s"] = time.monotonic() - started
    print(json.dumps(rounded(answer)))
    return 1 if answer["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(part.name for part in PARTS), help="parts, by commas")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds for all (default {LIMIT_S:g})")
    parser.add_argument(
        "--list", action="store_true", help="print what the first hour on a GPU must run, in order"
    )
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # of this process, as main starts it
    return parser


def reason_to_skip(part: Part, budget_s: float, device: str | None) -> str | None:
    """Return why `part` cannot be done here and now, None if it can."""
    if device is None:
        return "no GPU here"
    missing = [name for name in ("lazy_loader", *part.needs) if find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if budget_s < LEAST_S:
        return f"{max(0.0, budget_s):.0f} s are left, and {LEAST_S:g} are needed"
    return None


def run_part(name: str, budget_s: float) -> tuple[dict[str, Any], str]:
    """Return what a process of its own measured, and why it failed ("" where it did not)."""
    output, failure = _run([sys.executable, str(HERE / "gpu.py"), "--part", name], budget_s)
    lines = output.splitlines()
    return (json.loads(lines[-1]) if lines and not failure else {}), failure


def run_tests(part: Part, budget_s: float) -> tuple[dict[str, Any], str]:
    """Run the tests of a package that are marked gpu(1); count outcomes, also of those that time was left for."""
    with tempfile.TemporaryDirectory() as folder:
        ini = Path(folder) / "pytest.ini"
        ini.write_text(_pytest_ini())
        output, failure = _run(
            [sys.executable, "-m", "pytest", "-c", str(ini), "--rootdir", str(ROOT), "-m", "gpu", "-v",
             "--import-mode=importlib", "-p", "no:cacheprovider", "--tb=short", f"packages/{part.tests}/tests"],
            budget_s,
        )  # fmt: skip
    counts, failed = outcomes(output)
    found: dict[str, Any] = dict(counts)
    if failed:
        found["failed_tests"] = failed[:20]
    return found, "" if counts.get(
        "passed"
    ) and not failed and "took longer" not in failure else failure or "no test passed"


def _pytest_ini() -> str:
    """Return the settings of this checkout's tests that hold with the plugins that are there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    lines = ["[pytest]", "markers =", *(f"    {mark}" for mark in settings["markers"])]
    if find_spec("pytest_asyncio"):
        scopes = ("fixture", "test")
        lines += [
            "asyncio_mode = auto",
            *(f"asyncio_default_{scope}_loop_scope = module" for scope in scopes),
        ]
    return "\n".join(lines) + "\n"


def outcomes(output: str) -> tuple[dict[str, int], list[str]]:
    """Return how many tests passed, failed, erred and were skipped by pytest's verbose `output`, and who failed."""
    found = re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.MULTILINE)
    counts = Counter(outcome.lower() for _, outcome in found)
    return dict(counts), [name for name, outcome in found if outcome in {"FAILED", "ERROR"}]


def _run(command: list[str], budget_s: float) -> tuple[str, str]:
    """Return the stdout of `command`, and why it failed; it sees the sources of this checkout. Its stderr is ours."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=budget_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # and the ranks or replicas it has started
        output, _ = process.communicate()
        return output, f"took longer than {budget_s:.0f} s"
    return (
        output,
        "" if process.returncode == 0 else f"ended with code {process.returncode}: {output[-2000:].strip()}",
    )


def _measure(name: str) -> int:
    sys.path[:0] = [str(HERE)]
    from gpu_parts import PARTS as MEASURES

    print(json.dumps(MEASURES[name]()))
    return 0


def device() -> str | None:
    """Return the name of the GPU, None where there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def versions() -> dict[str, str | None]:
    """Return the version of Python, and of each of `PACKAGES` or None where it is not installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def rounded(value: Any) -> Any:  # noqa: ANN401 what JSON can say
    """Return `value` with five digits of every float in it, and null for what JSON cannot say."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if value - value == 0 else None
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in cast("dict[str, Any]", value).items()}
    return [rounded(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


if __name__ == "__main__":
    raise SystemExit(guarded(main))
