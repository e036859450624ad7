"""The keeper ends what it keeps, whoever goes first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from offbeat_rollout.sglang import SglangEngine, keeper
from offbeat_rollout.sglang.client import GRACE_S
from offbeat_rollout.sglang.server import STOP_TIMEOUT_S

pytestmark = pytest.mark.spawns

# A server with a process of its own, which shares memory as SGLang's do; the server says where they are, and waits.
SERVER = '''
import json, multiprocessing, os, subprocess, sys
own = multiprocessing.get_context("spawn").Semaphore()
lines = """
import mmap, multiprocessing, sys, time
semaphore = multiprocessing.get_context("spawn").Semaphore()
files = [open(name, "r+b") for name in sys.argv[1:]]
mapped = [mmap.mmap(file.fileno(), 0) for file in files]
print(semaphore._semlock.name, flush=True)
time.sleep(3600)
"""
child = subprocess.Popen([sys.executable, "-c", lines, *sys.argv[1:]], stdout=subprocess.PIPE)
semaphore = child.stdout.readline().decode().strip()
print(json.dumps([os.getpid(), child.pid, os.environ["TMPDIR"], semaphore, own._semlock.name]), flush=True)
child.wait()
'''
SHARED = Path("/dev/shm")
DEADLINE_S = 300


@pytest.fixture
def kept(tmp_path):
    folder, memory = tmp_path / "temporary", tmp_path / "memory"
    folder.mkdir()
    memory.mkdir()
    (memory / "model.safetensors").write_text("weights that the holder was about to load")
    kinds = ("sglang_loads_", "sgl_shm_mq_", "sem.mp-", "strange_")
    mapped = [SHARED / f"{kind}of_a_test_{os.getpid()}" for kind in kinds]
    others = SHARED / f"sem.mp-of_another_{os.getpid()}"
    for each in (*mapped, others):
        each.write_bytes(bytes(4096))
    server = [sys.executable, "-c", SERVER, *map(str, mapped)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", keeper.__file__, str(folder), str(memory), *server],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    server, child, where, *names = json.loads(process.stdout.readline())
    semaphores = [SHARED / f"sem.{name.removeprefix('/')}" for name in names]
    assert all(each.exists() for each in semaphores)
    assert where == str(folder)
    yield process, (server, child), (folder, memory, *semaphores, *mapped[:3])
    stay = [mapped[3], others]
    assert all(each.exists() for each in stay), "what is of another kind, or somebody else's, stays"
    process.stdin.close()
    process.kill()
    process.wait()
    process.stdout.close()
    for each in (*mapped, others):
        each.unlink(missing_ok=True)
    with suppress(ProcessLookupError):  # a killed keeper leaves what a server of SGLang would end itself
        os.kill(int(child), signal.SIGKILL)


def alive(pid):
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def wait_for(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def test_when_nobody_holds_the_other_end_all_are_ended_and_nothing_is_left(kept):
    process, pids, left = kept
    assert all(alive(pid) for pid in pids)
    process.stdin.close()  # what the kernel does when the holder is killed
    assert process.wait(DEADLINE_S) == 128 + signal.SIGKILL
    assert not any(alive(pid) for pid in pids)
    assert not any(each.exists() for each in left)


def looks(process):
    """How often the threads of a keeper have waited: one waits for the server all the time, one from look to look."""
    told = [task.joinpath("status").read_text() for task in Path(f"/proc/{process.pid}/task").iterdir()]
    return sum(int(one.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for one in told)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_takes_along_what_it_started_and_what_it_alone_knew(kept, how):
    process, (server, child), left = kept
    before = looks(process)
    wait_for(lambda: looks(process) > before + 4)
    os.kill(server, how)
    assert process.wait(DEADLINE_S) == 128 + how
    assert not alive(child)
    assert not any(each.exists() for each in left)


def test_a_killed_keeper_takes_the_server_along(kept):
    process, (server, _), _ = kept
    process.kill()
    wait_for(lambda: not alive(server))


def test_whoever_stops_waits_longer_than_what_is_waited_for():
    """The keeper for its group, the server's holder for the keeper, whoever told the engine to stop for that."""
    limits = [keeper.LEAVE_S, STOP_TIMEOUT_S, STOP_TIMEOUT_S + GRACE_S, SglangEngine.stop_timeout_s]
    assert limits == sorted(set(limits))
