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
from typing import TYPE_CHECKING, Any

import links
from no_digests import switch_off
from runner import BenchError, guarded, run_within, say, tail
from timed_syncs import Load, measure_apart

from offbeat_ckptsync.errors import SyncError
from offbeat_ckptsync.toolkit.config import SyncConfig

if TYPE_CHECKING:
    from offbeat_ckptsync.values import SyncReport

MIB = 1 << 20
BUCKET_MIB = {"shm": 64.0, "broadcast": 32.0, "disk": 32.0}
"""What each transport does best with here: every bucket of `shm` wakes four threads, and none is copied for its own sake."""

RECEIVERS = {"shm": (1, 4), "shm_adopted": (1,), "broadcast": (1,), "disk": (1,)}
"""How many receiving processes; all but `shm_adopted` copy what came into a module's own tensors, as vLLM's loaders do."""


APART_LIMIT_S = 420.0
VLLM, SIDES = "sync_vllm.py", ("offbeat", "native")


# As the entrypoints do; read when a process starts, so this one's own copies stay as they are.
TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x80000"


def main() -> int:
    """Measure what was asked for and print it."""
    os.environ.setdefault("GLIBC_TUNABLES", TUNABLES)
    options = _parser().parse_args()
    if options.smallest:
        options.mib, options.tensors, options.syncs = 1.0, [24], 1
    parts = options.only.split(",")
    answer: dict[str, Any] = {"machine": _machine()}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as scratch:
        limits = _limits(round(options.mib * MIB), scratch)
        answer |= {
            "memcpy_gb_per_s": limits["shm"],
            "libc_memcpy_gb_per_s": limits["libc"],
            "raw_gloo_gb_per_s": limits["broadcast"],
            "chunked_gloo_gb_per_s": limits["chunked"],
            "per_tensor_gloo_gb_per_s": limits["per tensor"],
            "raw_file_gb_per_s": limits["disk"],
        }
        for name, counts in RECEIVERS.items():
            if name in parts:
                limit = limits[name.removesuffix("_adopted")]
                answer[name] = {
                    f"{load.num_tensors} tensors": _transport(name, counts, limit, load, scratch, failed)
                    for load in _loads(options, adopts=name == "shm_adopted")
                }
        if "bound" in parts:
            answer["bound"] = _apart("bound.py", str(round(options.mib)), Path(scratch), failed)
        if "vllm" in parts:
            answer["vllm"] = _vllm(Path(scratch), failed, smallest=options.smallest)
        if "small" in parts:
            answer["small"] = _apart(VLLM, "small", Path(scratch), failed, smallest=options.smallest)
    answer |= {"figures": _summary(answer), "failed": failed}
    sys.stdout.write(json.dumps(answer, indent=None if options.json else 2) + "\n")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument(
        "--only", default="shm,shm_adopted,broadcast,bound,disk,vllm,small", help="parts to measure"
    )
    parser.add_argument("--mib", type=float, default=1024.0, help="MiB of weights (default 1024)")
    parser.add_argument(
        "--tensors", type=int, nargs="+", default=[24, 400],
        help="numbers of tensors, one after the other (default 24, of up to 88 MiB each, and 400)",
    )  # fmt: skip
    parser.add_argument(
        "--syncs", type=int, default=7, help="syncs that count, after a first one (default 7)"
    )
    parser.add_argument(
        "--smallest", action="store_true", help="as little as runs every part: a check, no figures"
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
        "libc": links.libc_memcpy(num_bytes),
        "broadcast": links.plain(gloo),
        "chunked": max(gloo.values()),
        "per tensor": gloo[links.PER_TENSOR],
        "disk": links.disk(num_bytes, scratch),
    }


def _loads(options: argparse.Namespace, *, adopts: bool) -> list[Load]:
    num_bytes = round(options.mib * MIB)
    return [
        Load(num_bytes=num_bytes, num_tensors=each, num_receivers=1, num_syncs=options.syncs, adopts=adopts)
        for each in options.tensors
    ]


def _transport(
    name: str, counts: tuple[int, ...], limit: float, load: Load, scratch: str, failed: list[str]
) -> dict[str, object]:
    transport = name.removesuffix("_adopted")
    config = SyncConfig(transport=transport, bucket_mib=BUCKET_MIB[transport], disk_path=f"{scratch}/disk")
    found: dict[str, object] = {}
    for count in counts:
        try:
            figures = _figures(measure_apart(replace(load, num_receivers=count), config), limit)
            if count == 1:
                without = measure_apart(replace(load, prepare=switch_off), config)
                figures |= _share_of_digests(figures["seconds"], without)
        except SyncError as error:
            failed.append(f"{name} with {count} receivers and {load.num_tensors} tensors: {error}")
            say(failed[-1])
            continue
        found[str(count)] = figures
        say(f"{name}, {load.num_tensors} tensors, {count} receivers: {json.dumps(found[str(count)])}")
    return found


def _figures(reports: list[SyncReport], limit: float) -> dict[str, Any]:
    counted = reports[1:]
    middle = sorted(counted, key=lambda report: report.total_s)[len(counted) // 2]
    seconds = median(report.total_s for report in counted)
    rate = middle.num_bytes / seconds / 1e9
    return {
        "seconds": seconds,
        "gb_per_s": rate,
        "fraction_of_limit": rate / limit,
        "pause_ms": median(report.pause_s for report in counted) * 1e3,
        "first_s": reports[0].total_s,
        "best_s": min(report.total_s for report in counted),
        "phases": {name: round(phase_s, 4) for name, phase_s in middle.phases.items()},
        "phases_over_wall": sum(middle.phases.values()) / middle.total_s,
    }


def _share_of_digests(seconds: float, unverified: list[SyncReport]) -> dict[str, float]:
    without = median(report.total_s for report in unverified[1:])
    return {"verify_share": max(0.0, (seconds - without) / seconds), "seconds_unverified": without}


def _vllm(scratch: Path, failed: list[str], *, smallest: bool) -> dict[str, Any]:
    found = {side: _apart(VLLM, side, scratch, failed, smallest=smallest) for side in SIDES}
    ours, native = found["offbeat"], found["native"]
    if not ours or not native:
        return {}
    return {
        "pause_ms": ours["pause_ms"],
        "worst_gap_ms": ours["worst_gap_ms"],
        "update_ms": ours["update_ms"],
        "native_pause_ms": native["pause_ms"],
        "native_worst_gap_ms": native["worst_gap_ms"],
        "native_update_ms": native["update_ms"],
        "steady_gap_ms": ours["steady_gap_ms"],
        "sides": found,
    }


def _apart(
    name: str, side: str, scratch: Path, failed: list[str], *, smallest: bool = False
) -> dict[str, Any]:
    """Run another file of this folder, which writes what it measured."""
    say(f"{name} {side}")
    out, log = scratch / f"{side}.json", scratch / f"{side}.log"
    script = Path(__file__).with_name(name)
    try:
        with log.open("wb") as output:
            command = [sys.executable, str(script), side, str(out), *(["smallest"] if smallest else [])]
            code = run_within(APART_LIMIT_S, command, output)
        if code != 0 or not out.exists():
            raise BenchError(f"ended with code {code}: {tail(log)}")
        return json.loads(out.read_text())
    except (BenchError, subprocess.SubprocessError) as error:
        failed.append(f"{name} {side}: {error}")
        say(failed[-1])
        return {}


def _summary(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that are aimed at, of the parts that were measured."""
    figures = _shm_summary(answer)
    for tensors, counts in answer.get("shm_adopted", {}).items():
        if one := counts.get("1"):
            figures.setdefault("shm_adopted_over_memcpy", {})[tensors] = one["fraction_of_limit"]
    for tensors, counts in answer.get("broadcast", {}).items():
        if counts:
            figures.setdefault("broadcast_over_gloo", {})[tensors] = counts["1"]["fraction_of_limit"]
    if bound := answer.get("bound"):
        figures["bound_verify_share"] = bound["verify_share"]
    if vllm := answer.get("vllm"):
        figures["vllm_pause_over_native"] = vllm["pause_ms"] / vllm["native_pause_ms"]
        figures["product_over_plain"] = vllm["update_ms"] / vllm["native_update_ms"]
    if small := answer.get("small"):
        figures["small_sync_ms"] = small["update_ms"]
    return figures


def _shm_summary(answer: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    libc, bound = answer["libc_memcpy_gb_per_s"], answer.get("bound")
    for tensors, counts in answer.get("shm", {}).items():
        if one := counts.get("1"):
            figures.setdefault("shm_over_memcpy", {})[tensors] = one["fraction_of_limit"]
            figures.setdefault("shm_over_libc_memcpy", {})[tensors] = one["gb_per_s"] / libc
            figures.setdefault("verify_share", {})[tensors] = one["verify_share"]
            if bound:
                figures.setdefault("shm_over_bound", {})[tensors] = bound["seconds"] / one["seconds"]
            if four := counts.get("4"):
                figures.setdefault("shm_four_over_one", {})[tensors] = four["seconds"] / one["seconds"]
    return figures


def _machine() -> dict[str, object]:
    return {
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(guarded(main))
