"""Kill the sender or a receiver of a weight sync, again and again, at random byte offsets, and count what that breaks.

    uv run python tools/bench/sync_chaos.py --kills 100 --json

A manager and two receivers run in processes of their own, reached over two carriers in turn: `sockets`, where they register
themselves, and `ray`, a run's own cluster with its training rank and two replicas, in processes that generate and train nothing.
With `--carrier sglang` the receivers have a real SGLang server each, which is the victim; see `sync_chaos_sglang.py`.
The sender and the receivers are victims in turn. A victim kills itself with SIGKILL after a number of bytes drawn at random, from
none to all: the sender a moment (up to 4 ms, some 1 MB of packing) after its weights have yielded them, within a tensor, a bucket,
or a packet; a receiver up to 60 ms after it has received them, so also while others verify, change over or commit. After each
kill every other receiver must serve the old version bit for bit, or the new one, under the right label; then the victim is replaced,
and a sync must reach everybody. The last line is one JSON object, the sum over all carriers, and each of them by itself:

    lost     receivers, but for victims, that died, were fenced off, or lost their traffic
    corrupt  receivers that served bits which belong to no version, or to another than their label says
    stuck    syncs that did not end within their deadline, or good ones that did not reach everybody
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from runner import guarded

from offbeat_ckptsync.toolkit.config import SyncConfig

SHARED = str(Path(__file__).parents[2] / "packages" / "ckptsync" / "tests" / "shared")
sys.path.insert(0, SHARED)

from sync_faults.hurt import MadeUp  # noqa: E402

PHASES = ("begin", "transfer", "verify", "flip", "commit")
DEADLINE_S = 60.0
"""Of one sync, all phases together; a sync here takes a tenth of a second."""

SENDER = "sender"
MOMENT_S = {"sender": 0.004, "receiver": 0.06}
"""Within which a victim is killed, once its bytes are there."""


@dataclass(slots=True)
class Count:
    """What happened."""

    kills: int = 0
    killed_receivers: int = 0  # of these
    lost: int = 0
    corrupt: int = 0
    stuck: int = 0
    failed_syncs: int = 0  # syncs that a kill failed; the receivers kept the old version
    whole_syncs: int = 0  # that a kill did not stop: it came late, or the others went on without a receiver
    good_syncs: int = 0  # with everybody, after each kill
    checks: int = 0  # of a receiver's weights, bit for bit


class Party(Protocol):
    """A sender and its receivers, over one carrier."""

    version: int
    receivers: tuple[str, ...]
    num_bytes: int  # of the weights

    def content(self, version: int) -> str:
        """Return the digest of all bits of the weights of `version`."""
        ...

    def kill_at(self, victim: str, num_bytes: int, delay_s: float) -> None:
        """Let the sender, or a receiver by its name, kill itself in the next sync, `delay_s` after so many bytes."""

    def sync(self, version: int) -> list[str]:
        """Bring weights of `version` to everybody; return who got them, nobody where it failed; raises `TimeoutError`."""
        ...

    def was_killed(self, victim: str) -> bool:
        """Wait for the victim's end, and say whether it was a kill."""
        ...

    def serving(self, dead: str = "") -> dict[str, tuple[int, str, bool]]:
        """Return version, content and whether it is committed of every receiver that is alive and has traffic."""
        ...

    def heal(self, victim: str) -> None:
        """Start another in the place of the victim, or wait until that is done; all are together then."""

    def close(self) -> None:
        """End all processes."""


class OverSockets(MadeUp):
    """Everybody registers at a store; see `sync_faults.processes`."""

    def __init__(self, transport: str) -> None:
        from sync_faults.processes import FaultProcesses

        self._all = FaultProcesses(_config(transport))
        self.version = 0
        self.receivers = tuple(self._all.receivers)

    def kill_at(self, victim: str, num_bytes: int, delay_s: float) -> None:
        """See `Party`."""
        self._all.actors[victim].ask("kill_at", num_bytes, delay_s)

    def sync(self, version: int) -> list[str]:
        """See `Party`."""
        self._all.sender.ask("weights", version)
        return self._all.manager.ask("sync", version, {}, timeout_s=DEADLINE_S).get("members", [])

    def was_killed(self, victim: str) -> bool:
        """See `Party`."""
        process = self._all.actors[victim].process
        process.join(DEADLINE_S)
        return process.exitcode == -9

    def serving(self, dead: str = "") -> dict[str, tuple[int, str, bool]]:
        """See `Party`."""
        return {name: (held[0], held[1], held[2]) for name, held in self._all.serving().items()}

    def heal(self, victim: str) -> None:
        """See `Party`."""
        self._all.heal()

    def close(self) -> None:
        """See `Party`."""
        self._all.close()


class Chaos:
    """One party and what became of it."""

    def __init__(self, party: Party, seed: int, log: bool) -> None:
        self._party = party
        self._random = random.Random(seed)
        self._log = log
        self.count = Count()

    def round(self, number: int) -> None:
        """Kill one process in a sync, look at everybody, and sync well."""
        victim = SENDER if number % 2 == 0 else self._random.choice(self._party.receivers)
        kill_at = self._random.randint(1, self._party.num_bytes)
        moment_s = MOMENT_S["sender" if victim == SENDER else "receiver"]
        self._party.kill_at(victim, kill_at, self._random.uniform(0, moment_s))
        told = self._sync()
        was_killed = self._party.was_killed(victim)
        self.count.kills += was_killed
        self.count.killed_receivers += was_killed and victim != SENDER
        self.count.failed_syncs += not told
        self.count.whole_syncs += bool(told)
        self._check(self._party.version if told else self._party.version - 1, victim)
        if self._log:
            print(f"{victim} killed at byte {kill_at}: {told or 'nobody'} changed over", file=sys.stderr)
        self._party.heal(victim)
        self.good()

    def good(self) -> None:
        """Sync with a sender that lives; everybody serves the new version."""
        told = self._sync()
        if sorted(told) != sorted(self._party.receivers):
            self.count.stuck += 1
            print(f"a good sync did not reach everybody: {told}", file=sys.stderr)
        self.count.good_syncs += 1
        self._check(self._party.version)

    def _sync(self) -> list[str]:
        self._party.version += 1
        try:
            return self._party.sync(self._party.version)
        except (TimeoutError, EOFError) as error:
            self.count.stuck += 1
            print(f"a sync did not end: {error!r}", file=sys.stderr)
            return []

    def _check(self, version: int, victim: str = "") -> None:
        served = self._party.serving(victim)
        others = [name for name in self._party.receivers if name != victim]
        self.count.lost += len([name for name in others if name not in served])
        for name, held in served.items():
            self.count.checks += 1
            if held != (version, self._party.content(version), True):
                self.count.corrupt += 1
                print(f"{name} serves {held}, not {version}", file=sys.stderr)


def _config(transport: str, deadline_s: float = DEADLINE_S) -> SyncConfig:
    deadlines: dict[str, Any] = {f"{phase}_timeout_s": deadline_s / len(PHASES) for phase in PHASES}
    return SyncConfig(transport=transport, bucket_mib=1 / 64, **deadlines)


def _open(carrier: str, kind: str) -> Party:
    if carrier == "sockets":
        return OverSockets(kind)
    if carrier == "sglang":
        from sync_chaos_sglang import SYNC_S, OverSglang

        return OverSglang(_config("shm", SYNC_S), kind)
    # Read by Ray when it is imported, and by the processes that it starts.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SHARED, os.environ.get("PYTHONPATH"))))
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    from offbeat_recipes.cli._environment import prepare_environment

    prepare_environment()
    from sync_chaos_ray import OverRay

    return OverRay(_config(kind), deadline_s=DEADLINE_S)


def _run(carrier: str, arguments: argparse.Namespace) -> Count:
    total = Count()
    kinds = (arguments.ways if carrier == "sglang" else arguments.transport).split(",")
    for i, kind in enumerate(kinds):
        party = _open(carrier, kind)
        chaos = Chaos(party, arguments.seed + i, log=not arguments.json)
        try:
            chaos.good()
            for number in range(len(range(i, arguments.kills, len(kinds)))):
                chaos.round(number)
        finally:
            party.close()
        _add(total, chaos.count)
    return total


def _add(total: Count, count: Count) -> None:
    for item in fields(Count):
        setattr(total, item.name, getattr(total, item.name) + getattr(count, item.name))


def main() -> int:
    """Run; 0 when nothing was lost, corrupt or stuck, and every kill was one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--kills", type=int, default=100, help="how many processes to kill, per carrier (100)"
    )
    parser.add_argument("--carrier", default="sockets,ray", help="among sockets, ray, sglang (sockets,ray)")
    parser.add_argument("--transport", default="shm,broadcast", help="transports, taken in turn")
    parser.add_argument(
        "--ways",
        default="files,tensors,group,adapter",
        help="into SGLang's servers, taken in turn; bytes come by shm",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the offsets (default 0)")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    arguments = parser.parse_args()
    started, total = time.monotonic(), Count()
    carriers = arguments.carrier.split(",")
    counts = {carrier: _run(carrier, arguments) for carrier in carriers}
    for count in counts.values():
        _add(total, count)
    result = {**asdict(total), "carriers": {name: asdict(count) for name, count in counts.items()}}
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({**result, "seconds": seconds}))
    broken = total.lost or total.corrupt or total.stuck or total.kills != arguments.kills * len(carriers)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
