# pyright: basic
"""Forks runs that kill themselves. Started by test_kill.py; one JSON line in, one JSON line out.

A run counts what its interpreter does (calls and returns of Python and C functions, as `sys.setprofile` sees them) and
sends itself SIGKILL at the one it was told: an instant that can be named, and hit again.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.config import AsyncConfig, GrpoConfig, LoopConfig, Order, Partial
from offbeat_trainer.loops.journal import SqliteJournal
from scripted import FlatTask, ScriptedPool, ScriptedRun, ScriptedTask

KINDS = {"order": Order, "partial": Partial}


def run(job):
    import random

    draws = random.Random(job["life"])  # every life has a timing of its own
    asynchrony: dict[str, Any] = {
        name: KINDS[name](value) if name in KINDS else value for name, value in job["asynchrony"].items()
    }
    done = ScriptedRun(
        folder=Path(job["folder"]),
        mode=job["mode"],
        loop=LoopConfig(**job["loop"]),
        asynchrony=AsyncConfig(**asynchrony),
        journal=SqliteJournal(Path(job["folder"]) / "journal.sqlite"),
        task=FlatTask(job["flat"]) if "flat" in job else ScriptedTask(),
        algorithm=Grpo(config=GrpoConfig(dynamic_sampling="flat" in job)),
        pool=ScriptedPool(pace=lambda request: draws.uniform(0.001, 0.4)),
        train_s=lambda step: draws.uniform(0.0, 3.0),
        max_tokens=8,
    ).go()
    return {
        "history": done.policy.history,
        "prompts": done.policy.prompts,
        "logits": done.policy.logits.tolist(),
    }


def child(job):
    num_events = 0

    def count(frame, event, arg):
        nonlocal num_events
        num_events += 1
        if num_events == job["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    result = run(job)
    sys.setprofile(None)
    Path(job["result"]).write_text(json.dumps(result | {"num_events": num_events}))


def main():
    torch.set_num_threads(1)
    torch.zeros(2).softmax(0)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(job)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(
            json.dumps({"killed": os.WIFSIGNALED(status), "code": os.waitstatus_to_exitcode(status)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
