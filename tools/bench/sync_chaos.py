"""Kill the sending process of a weight sync, again and again, at random byte offsets, and count what that breaks.

    uv run python tools/bench/sync_chaos.py --kills 100 --json

A manager and two receivers run in processes of their own. Before each kill a fresh sender joins them; it kills itself
with SIGKILL a random moment (up to 4 ms, some 1 MB of packing) after its weights have yielded a number of bytes drawn at
random, from none to all: within a tensor, a bucket, or a packet. After each kill every receiver must serve the old version bit for bit, or the new one, under the right label; then another sender joins, and a
sync must reach everybody. The last line is one JSON object:

    lost     receivers that died or were fenced off
    corrupt  receivers that served bits which belong to no version, or to another than their label says
    stuck    syncs that did not end within their deadline, or good ones that did not reach everybody
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from offbeat_ckptsync.config import SyncConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "ckptsync" / "tests" / "shared"))

from sync_faults.hurt import content_of, weights_of
from sync_faults.processes import FaultProcesses

DEADLINE_S = 60.0
"""Of one sync, all phases together; a sync here takes a tenth of a second."""

MOMENT_S = 0.004


@dataclass(slots=True)
class Count:
    """What happened."""

    kills: int = 0
    lost: int = 0
    corrupt: int = 0
    stuck: int = 0
    failed_syncs: int = 0  # syncs that a kill failed; the receivers kept the old version
    whole_syncs: int = 0  # kills that came when all bytes had left: the new version was served
    good_syncs: int = 0  # with a fresh sender, after each kill
    checks: int = 0  # of a receiver's weights, bit for bit


class Chaos:
    """One cluster and what became of it."""

    def __init__(self, transport: str, seed: int, log: bool) -> None:
        phases = ("begin", "transfer", "verify", "flip", "commit")
        deadlines = {f"{phase}_timeout_s": DEADLINE_S / len(phases) for phase in phases}
        self._troupe = FaultProcesses(SyncConfig(transport=transport, bucket_mib=1 / 64, **deadlines))
        self._content = lambda version: content_of(weights_of(version))
        self._num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights_of(0).values())
        self._random = random.Random(seed)
        self._log = log
        self.count = Count()

    def round(self) -> None:
        """Kill one sender in a sync, look at everybody, and sync well."""
        kill_at = self._random.randint(1, self._num_bytes)
        self._troupe.sender.ask("kill_at", kill_at, self._random.uniform(0, MOMENT_S))
        result = self._sync()
        self._troupe.sender.process.join(DEADLINE_S)
        self.count.kills += self._troupe.sender.process.exitcode == -9
        failed = "error" in result
        self.count.failed_syncs += failed
        self.count.whole_syncs += not failed
        version = self._troupe.version - 1 if failed else self._troupe.version
        self._check(version)
        if self._log:
            print(f"killed at byte {kill_at}: {result}", file=sys.stderr)
        self._troupe.heal()
        self.good()

    def good(self) -> None:
        """Sync with a sender that lives; everybody serves the new version."""
        result = self._sync()
        if sorted(result.get("members", [])) != sorted(self._troupe.receivers):
            self.count.stuck += 1
            print(f"a good sync did not reach everybody: {result}", file=sys.stderr)
        self.count.good_syncs += 1
        self._check(self._troupe.version)

    def close(self) -> None:
        """End all processes."""
        self._troupe.close()

    def _sync(self) -> dict[str, object]:
        self._troupe.version += 1
        self._troupe.sender.ask("weights", self._troupe.version)
        try:
            return self._troupe.manager.ask("sync", self._troupe.version, {}, timeout_s=DEADLINE_S)
        except (TimeoutError, EOFError) as error:
            self.count.stuck += 1
            return {"error": str(error)}

    def _check(self, version: int) -> None:
        served = self._troupe.serving()
        self.count.lost += len(self._troupe.receivers) - len(served)
        for name, (actual, content, committed, _) in served.items():
            self.count.checks += 1
            if (actual, content, committed) != (version, self._content(version), True):
                self.count.corrupt += 1
                print(f"{name} serves {actual} ({content}, {committed}), not {version}", file=sys.stderr)


def main() -> int:
    """Run; 0 when nothing was lost, corrupt or stuck, and every kill was one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how many senders to kill (default 100)")
    parser.add_argument("--transport", default="shm,broadcast", help="transports, taken in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the offsets (default 0)")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    arguments = parser.parse_args()
    started, total = time.monotonic(), Count()
    transports = arguments.transport.split(",")
    for i, transport in enumerate(transports):
        kills = len(range(i, arguments.kills, len(transports)))
        chaos = Chaos(transport, arguments.seed + i, log=not arguments.json)
        try:
            chaos.good()
            for _ in range(kills):
                chaos.round()
        finally:
            chaos.close()
        for name, number in asdict(chaos.count).items():
            setattr(total, name, getattr(total, name) + number)
    seconds = time.monotonic() - started
    print(json.dumps({**asdict(total), "transports": transports, "seconds": round(seconds, 1)}))
    broken = total.lost or total.corrupt or total.stuck or total.kills != arguments.kills
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
