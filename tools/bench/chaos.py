#!/usr/bin/env python3
"""kill -9 at random: driver, replica or training rank of a fully asynchronous run, again and again, to its end.

    uv run tools/bench/chaos.py --kills 20 --json

After the death of the driver or a rank the run is started again with resume=auto; after that of a replica it must go on
by itself. When it has ended, journal and metrics are read. Progress goes to stderr. With --json the last line of stdout
is one JSON object. The exit code is 1 unless `lost`, `duplicated`, `zero_reward_pollution` and `unresumed` are all 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from chaos_account import account_of, steps_on_record
from runner import BenchError, guarded, say, tail

GROUPS, GROUP_SIZE = 8, 4
SAVE_EVERY = 10
POLL_S = 0.05
RESUME_TIMEOUT_S = 420.0  # from a kill to the next step on record
END_TIMEOUT_S = 120.0  # of a run whose rank has died
ORPHAN_TIMEOUT_S = 60.0
VICTIMS = ("driver", "replica", "training rank")


@dataclass(slots=True, kw_only=True)
class Chaos:
    """One run in `folder`, and what was done to it."""

    folder: Path
    options: argparse.Namespace
    dice: random.Random
    kills: Counter[str] = field(default_factory=Counter[str])
    unresumed: int = 0
    orphans: int = 0
    longest_wait_s: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    _moved_s: float | None = None  # when the journal last changed, once it has since the start
    _seen: tuple[int, int] = (0, 0)

    @property
    def steps(self) -> int:
        """How many steps the whole run has."""
        return (self.options.kills + 1) * self.options.steps_per_kill

    @property
    def done(self) -> int:
        """How many are on record."""
        return len(steps_on_record(self.folder))

    def start(self) -> None:
        """Start the run, or go on with it."""
        settings = {
            "task": "arithmetic",
            "mode": "fully_async",
            "rollout": self.options.rollout,
            "rollout.num_replicas": self.options.replicas,
            "run_dir": self.folder,
            "warmup.steps": 10,
            "trainer.steps": self.steps,
            "trainer.prompts_per_step": GROUPS,
            "trainer.group_size": GROUP_SIZE,
            "trainer.save_every": SAVE_EVERY,
            "trainer.keep_checkpoints": self.steps,  # so that the journal forgets no completion
            "trainer.validate_every": 0,
            "trainer.validation_prompts": 1,
            "trainer.step_timeout_s": self.options.deadline_s,
            "report.console": "false",
            "report.trackers": "[]",
            "resume": "auto",
        }
        command = [sys.executable, "-m", "offbeat_recipes.cli.train"]
        command += [f"{key}={value}" for key, value in settings.items()]
        with self.folder.with_suffix(".log").open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        self._moved_s, self._seen = None, self._state()

    def look(self) -> None:
        """Note whether the journal has moved; where it has not, how long it has stood still.

        The time from a start to the first movement is explained by the start, and that after the last step by the end.
        """
        now_s = time.monotonic()
        state = self._state()
        if state != self._seen:
            self._seen, self._moved_s = state, now_s
        elif self._moved_s is not None and self.done < self.steps:
            self.longest_wait_s = max(self.longest_wait_s, now_s - self._moved_s)

    def _state(self) -> tuple[int, int]:
        log = self.folder / "checkpoints" / "journal.sqlite-wal"
        return (log.stat().st_mtime_ns, log.stat().st_size) if log.exists() else (0, 0)

    def until_step(self, step: int) -> bool:
        """Wait until `step` steps are on record; False if the run ends or takes too long before."""
        assert self.process is not None
        deadline_s = time.monotonic() + RESUME_TIMEOUT_S
        while self.done < step:
            self.look()
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                return self.done >= step
            time.sleep(POLL_S)
        return True

    def kill(self, victim: str) -> None:
        """Kill one process of that kind and bring the run back to work."""
        assert self.process is not None
        pids = {
            "driver": lambda: [self.process.pid],  # type: ignore[union-attr]
            "replica": lambda: self._with_open("replica"),
            "training rank": lambda: self._with_open("train_rank"),
        }[victim]()
        if not pids:
            raise BenchError(
                f"there is no {victim} to kill; the run's log:\n{tail(self.folder.with_suffix('.log'))}"
            )
        before = self.done
        os.kill(self.dice.choice(pids), signal.SIGKILL)
        self.kills[victim] += 1
        if victim != "replica":
            self._end()
            self.start()
        # One step more than is being made: the next one needs whatever was killed.
        if not self.until_step(min(before + 2, self.steps)):
            self.unresumed += 1
            say(f"  did not go on after the {victim} was killed:\n{tail(self.folder.with_suffix('.log'))}")
            self._end()
            self.start()

    def _end(self) -> None:
        """Wait for the driver to be gone, and everything that it started."""
        assert self.process is not None
        self._moved_s = None
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.unresumed += 1
            say(f"  the driver still runs {END_TIMEOUT_S:g} s later")
            self.process.kill()
            self.process.wait()
        deadline_s = time.monotonic() + ORPHAN_TIMEOUT_S
        while left := self._with_open(""):
            if time.monotonic() > deadline_s:
                self.orphans += len(left)
                say(f"  processes {left} outlive the run")
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                return
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the run, and everything that has one of its logs open."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for pid in self._with_open(""):
            os.kill(pid, signal.SIGKILL)

    def _with_open(self, log: str) -> list[int]:
        """Return the processes that have a log open whose name begins with `log`, the driver's own aside."""
        start = str((self.folder / "logs").absolute()) + "/" + log
        return [
            int(pid)
            for pid in os.listdir("/proc")
            if pid.isdigit() and (log or int(pid) != os.getpid()) and _has_open(pid, start)
        ]


def _has_open(pid: str, start: str) -> bool:
    try:
        files = [os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any(file.startswith(start) for file in files)


def run(chaos: Chaos) -> dict[str, object]:
    """Let the run come to its end through all kills, and return what its records say."""
    started_s = time.monotonic()
    chaos.start()
    for number in range(chaos.options.kills):
        if not chaos.until_step(chaos.done + chaos.dice.randint(1, chaos.options.steps_per_kill // 4)):
            raise BenchError(f"the run does not work by itself:\n{tail(chaos.folder.with_suffix('.log'))}")
        time.sleep(chaos.dice.uniform(0.0, chaos.options.spread_s))
        if chaos.done >= chaos.steps - 1:
            raise BenchError(f"the run was over before kill {number + 1}; use a smaller --spread-s")
        victim = chaos.dice.choice(chaos.options.victims.split(","))
        say(f"kill {number + 1} of {chaos.options.kills}: {victim}, after step {chaos.done}")
        chaos.kill(victim)
    came = chaos.until_step(chaos.steps)
    assert chaos.process is not None
    code = chaos.process.wait(RESUME_TIMEOUT_S)
    chaos.unresumed += not came or code != 0
    account = account_of(chaos.folder, steps=chaos.steps, groups_per_step=GROUPS, group_size=GROUP_SIZE)
    return {
        "lost": account.lost,
        "duplicated": account.duplicated,
        "zero_reward_pollution": account.polluted,
        "unresumed": chaos.unresumed,
        "longest_unexplained_wait_s": round(chaos.longest_wait_s, 2),
        "deadline_s": chaos.options.deadline_s,
        "kills": dict(chaos.kills),
        "dropped": account.dropped,
        "orphans": chaos.orphans,
        "steps": chaos.steps,
        "groups": chaos.steps * GROUPS,
        "wall_s": round(time.monotonic() - started_s, 1),
        "seed": chaos.options.seed,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--steps-per-kill",
        type=int,
        default=40,
        help="so many that the run does not end before the last kill",
    )
    parser.add_argument("--victims", default=",".join(VICTIMS), help="who is killed, by commas")
    parser.add_argument("--rollout", default="vllm", help="adapter")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed, and when")
    parser.add_argument(
        "--spread-s", type=float, default=2.0, help="a kill comes up to so much after its step"
    )
    parser.add_argument("--deadline-s", type=float, default=240.0, help="of the run's own watchdog")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the run folder there")
    options = parser.parse_args()
    if options.kills < 1:
        parser.error(f"--kills: expected at least 1, got {options.kills}")
    if options.keep and Path(options.keep).exists():
        parser.error(f"--keep: expected a folder that is not there yet, got {options.keep}")
    return options


def main() -> int:
    """Do it; return the exit code."""
    options = _options()
    scratch = Path(options.keep or tempfile.mkdtemp(prefix="offbeat-chaos-")).absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    chaos = Chaos(folder=scratch / "run", options=options, dice=random.Random(options.seed))
    try:
        answer = run(chaos)
    except BenchError as error:
        say(f"failed: {error}")
        return 1
    finally:
        chaos.close()
        if not options.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps(answer, indent=None if options.json else 2))
    bad = [answer[key] for key in ("lost", "duplicated", "zero_reward_pollution", "unresumed")]
    return 1 if any(bad) or chaos.longest_wait_s >= options.deadline_s else 0


if __name__ == "__main__":
    sys.exit(guarded(main, adopts=False))  # it counts who outlives a run
