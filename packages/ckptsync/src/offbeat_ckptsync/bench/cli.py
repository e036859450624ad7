"""`offbeat-sync-bench`: measure this machine's links, and say what a sync of a model of a given size will take."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from offbeat_ckptsync.bench import links
from offbeat_ckptsync.bench.syncs import Load, measure_apart
from offbeat_ckptsync.config import SyncConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
BUCKET_MIB = {"shm": 64.0, "broadcast": 32.0, "disk": 32.0}
"""What each transport does best with here: every bucket of `shm` wakes four threads, and none is copied for its own sake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a transport does on this machine: `seconds` for `num_bytes` to one receiver, `fixed_s` for next to nothing."""

    transport: str
    limit_gb_per_s: float
    num_bytes: int
    seconds: float
    fixed_s: float

    def estimate_s(self, num_bytes: float) -> float:
        """Return what a sync of `num_bytes` will take: the fixed part, and bytes at the measured rate."""
        return self.fixed_s + num_bytes * max(self.seconds - self.fixed_s, 0.0) / self.num_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code is 0."""
    options = _parser().parse_args(arguments)
    names = [name for name in options.transports.split(",") if name]
    with tempfile.TemporaryDirectory(prefix="offbeat-", dir=options.disk_path) as folder:
        limits = measure_limits(names, round(options.mib * MIB), folder)
        found = [
            measure_link(name, limits[name], round(options.mib * MIB), options.tensors, folder)
            for name in names
        ]
    sys.stdout.write(_json(found, options.models) if options.json else _table(found, options.models))
    return 0


def measure_limits(names: Sequence[str], num_bytes: int, folder: str) -> dict[str, float]:
    """Return the GB/s that each transport of `names` is held against: memcpy, raw gloo, a plain file."""
    ways = {
        "shm": lambda: links.memcpy(num_bytes),
        "broadcast": lambda: links.plain(links.raw_gloo(num_bytes)),
        "disk": lambda: links.disk(num_bytes, folder),
    }
    return {name: ways[name]() for name in names}


def measure_link(name: str, limit_gb_per_s: float, num_bytes: int, num_tensors: int, folder: str) -> Link:
    """Time real syncs over the transport `name`, verification on, to one receiving process."""
    config = SyncConfig(transport=name, bucket_mib=BUCKET_MIB[name], disk_path=folder)
    small = Load(num_bytes=1024 * num_tensors, num_tensors=num_tensors, num_receivers=1, num_syncs=5)
    large = Load(num_bytes=num_bytes, num_tensors=num_tensors, num_receivers=1, num_syncs=5)
    reports = measure_apart(large, config)
    return Link(
        transport=name,
        limit_gb_per_s=limit_gb_per_s,
        num_bytes=reports[0].num_bytes,
        seconds=median(report.total_s for report in reports[1:]),
        fixed_s=median(report.total_s for report in measure_apart(small, config)[1:]),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="offbeat-sync-bench", description=__doc__)
    parser.add_argument("--mib", type=float, default=512.0, help="MiB of weights to sync (default 512)")
    parser.add_argument("--tensors", type=int, default=400, help="number of tensors (default 400)")
    parser.add_argument(
        "--models", type=float, nargs="+", default=[1.0, 3.0, 14.0, 64.0], metavar="GB",
        help="sizes of models to estimate, in GB (1e9 bytes)",
    )  # fmt: skip
    parser.add_argument("--transports", default="shm,broadcast,disk", help="which to measure")
    parser.add_argument(
        "--disk-path", default=None, help="folder for `disk` (default: the system's temporary one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def _table(found: Sequence[Link], models: Sequence[float]) -> str:
    head = f"{'transport':<11}{'limit':>11}{'reached':>11}{'of limit':>10}" + "".join(
        f"{f'{size:g} GB':>10}" for size in models
    )
    rows = [head]
    for link in found:
        rate = link.num_bytes / link.seconds / 1e9
        rows.append(
            f"{link.transport:<11}{link.limit_gb_per_s:>6.2f} GB/s{rate:>6.2f} GB/s"
            f"{rate / link.limit_gb_per_s:>10.0%}"
            + "".join(f"{f'{link.estimate_s(size * 1e9):.2f} s':>10}" for size in models)
        )
    rows.append(
        "Seconds from begin to commit, to one receiver, verified. Limits: one thread's memcpy, raw gloo broadcast, a plain\n"
        "file written and read. Every report of a sync says how much of memcpy it reached."
    )
    return "\n".join(rows) + "\n"


def _json(found: Sequence[Link], models: Sequence[float]) -> str:
    answer = {
        link.transport: {
            "limit_gb_per_s": link.limit_gb_per_s,
            "gb_per_s": link.num_bytes / link.seconds / 1e9,
            "fraction_of_limit": link.num_bytes / link.seconds / 1e9 / link.limit_gb_per_s,
            "fixed_s": link.fixed_s,
            "estimate_s": {f"{size:g}": link.estimate_s(size * 1e9) for size in models},
        }
        for link in found
    }
    return json.dumps(answer) + "\n"


if __name__ == "__main__":
    sys.exit(main())
