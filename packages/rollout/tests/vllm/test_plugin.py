"""A process named as vLLM names its engine ends with its parent; others do not care."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.spawns

PROGRAM = """
import multiprocessing, os, sys, time
from offbeat_rollout.vllm.plugin import die_with_parent

def child(pipe):
    die_with_parent()
    pipe.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,), name=sys.argv[1], daemon=False)
    process.start()
    print(ours.recv(), flush=True)
    os.kill(os.getpid(), 9)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("name", "wanted", "dies"), [("EngineCore", "1", True), ("EngineCore", "0", False), ("Other", "1", False)]
)
def test_who_dies_with_a_killed_parent(tmp_path, name, wanted, dies):
    script = tmp_path / "parent.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "OFFBEAT_VLLM_DIES_WITH_PARENT": wanted}
    with subprocess.Popen(
        [sys.executable, script, name], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.wait(600) == -9
        deadline = time.monotonic() + (600 if dies else 2)
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        still_there = alive(pid)
        if still_there:
            os.kill(pid, 9)
    assert still_there is not dies
