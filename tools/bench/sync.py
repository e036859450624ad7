#!/usr/bin/env python3
"""What a weight sync takes on this machine, held against what the machine can do, measured in the same run.

    uv run tools/bench/sync.py --json

Progress goes to stderr. With --json the last line of stdout is one JSON object, else the same indented. `README.md`
beside this file says what each figure means. The exit code is 1 if a part that was asked for could not be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from failures import BenchError, run_within, tail

from offbeat_ckptsync.bench import links
from offbeat_ckptsync.bench.cli import BUCKET_MIB, MIB
from offbeat_ckptsync.bench.syncs import Load, measure_apart
from offbeat_ckptsync.config import SyncConfig
from offbeat_ckptsync.errors import SyncError

if TYPE_CHECKING:
    from offbeat_ckptsync.values import SyncReport

RECEIVERS = {"shm": (1, 2, 4), "shm_copied": (1, 2, 4), "broadcast": (1,), "disk": (1,)}
VLLM_LIMIT_S = 420.0
SIDES = ("offbeat", "native")


def main() -> int:
    """Measure what was asked for and print it."""
    options = _parser().parse_args()
    parts = options.only.split(",")
    answer: dict[str, object] = {"machine": _machine()}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as scratch:
        num_bytes = round(options.mib * MIB)
        limits = _limits(num_bytes, scratch)
        answer |= {
            "memcpy_gb_per_s": limits["shm"],
            "raw_gloo_gb_per_s": limits["broadcast"],
            "chunked_gloo_gb_per_s": limits["chunked"],
            "per_tensor_gloo_gb_per_s": limits["per tensor"],
            "raw_file_gb_per_s": limits["disk"],
        }
        for name, counts in RECEIVERS.items():
            if name in parts:
                limit = limits[name.removesuffix("_copied")]
                answer[name] = _transport(name, counts, limit, options, scratch, failed)
        if "vllm" in parts:
            answer["vllm"] = _vllm(Path(scratch), failed)
    answer["failed"] = failed
    sys.stdout.write(json.dumps(answer, indent=None if options.json else 2) + "\n")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--only", default="shm,shm_copied,broadcast,disk,vllm", help="parts to measure")
    parser.add_argument("--mib", type=float, default=1024.0, help="MiB of weights (default 1024)")
    parser.add_argument("--tensors", type=int, default=400, help="number of tensors (default 400)")
    parser.add_argument(
        "--syncs", type=int, default=7, help="syncs that count, after a first one (default 7)"
    )
    return parser


def _limits(num_bytes: int, scratch: str) -> dict[str, float]:
    say("measuring memcpy, raw gloo and a plain file")
    gloo = links.raw_gloo(num_bytes)
    for calls, rate in gloo.items():
        say(
            f"raw gloo in calls of {calls.num_bytes / MIB:g} MiB, {calls.in_flight} at a time: {rate:.2f} GB/s"
        )
    return {
        "shm": links.memcpy(num_bytes),
        "broadcast": links.plain(gloo),
        "chunked": max(gloo.values()),
        "per tensor": gloo[links.PER_TENSOR],
        "disk": links.disk(num_bytes, scratch),
    }


def _transport(
    name: str,
    counts: tuple[int, ...],
    limit: float,
    options: argparse.Namespace,
    scratch: str,
    failed: list[str],
) -> dict[str, object]:
    transport = name.removesuffix("_copied")
    config = SyncConfig(
        transport=transport,
        bucket_mib=BUCKET_MIB[transport],
        disk_path=f"{scratch}/disk",
        limit_gb_per_s=limit,
    )
    found: dict[str, object] = {}
    for count in counts:
        load = Load(
            num_bytes=round(options.mib * MIB), num_tensors=options.tensors, num_receivers=count,
            num_syncs=options.syncs, adopts=name == transport,
        )  # fmt: skip
        try:
            found[str(count)] = _figures(
                measure_apart(load, config), measure_apart(replace(load, digests=False), config)
            )
        except SyncError as error:
            failed.append(f"{name} with {count} receivers: {error}")
            say(failed[-1])
            continue
        say(f"{name}, {count} receivers: {json.dumps(found[str(count)])}")
    return found


def _figures(reports: list[SyncReport], unverified: list[SyncReport]) -> dict[str, object]:
    counted = reports[1:]
    middle = sorted(counted, key=lambda report: report.total_s)[len(counted) // 2]
    seconds = median(report.total_s for report in counted)
    without = median(report.total_s for report in unverified[1:])
    rate = middle.num_bytes / seconds / 1e9
    return {
        "seconds": seconds,
        "gb_per_s": rate,
        "fraction_of_limit": rate / middle.limit_gb_per_s,
        "verify_share": max(0.0, (seconds - without) / seconds),
        "seconds_unverified": without,
        "first_s": reports[0].total_s,
        "best_s": min(report.total_s for report in counted),
        "phases": {name: round(phase_s, 4) for name, phase_s in middle.phases.items()},
        "phases_over_wall": sum(middle.phases.values()) / middle.total_s,
    }


def _vllm(scratch: Path, failed: list[str]) -> dict[str, object]:
    found: dict[str, dict[str, float]] = {}
    for side in SIDES:
        say(f"vLLM, {side}")
        out, log = scratch / f"{side}.json", scratch / f"{side}.log"
        script = Path(__file__).with_name("sync_vllm.py")
        try:
            with log.open("wb") as output:
                code = run_within(VLLM_LIMIT_S, [sys.executable, str(script), side, str(out)], output)
            if code != 0 or not out.exists():
                raise BenchError(f"ended with code {code}: {tail(log)}")
            found[side] = json.loads(out.read_text())
        except (BenchError, subprocess.SubprocessError) as error:
            failed.append(f"vllm {side}: {error}")
            say(failed[-1])
    if len(found) < len(SIDES):
        return {}
    ours, native = found["offbeat"], found["native"]
    return {
        "pause_ms": ours["pause_ms"],
        "worst_gap_ms": ours["worst_gap_ms"],
        "native_pause_ms": native["pause_ms"],
        "native_worst_gap_ms": native["worst_gap_ms"],
        "steady_gap_ms": ours["steady_gap_ms"],
        "sides": found,
    }


def _machine() -> dict[str, object]:
    return {
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def say(text: str) -> None:
    """Tell how far it is, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
