"""The keeper ends what it keeps, whoever goes first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from offbeat_rollout.sglang import keeper

pytestmark = pytest.mark.spawns

# A server with a process of its own, which shares memory as SGLang's do; the server says where they are, and waits.
SERVER = """
import os, subprocess, sys
lines = "import mmap, sys, time; file = open(sys.argv[1], 'r+b'); shared = mmap.mmap(file.fileno(), 0); print(flush=True); time.sleep(3600)"
child = subprocess.Popen([sys.executable, "-c", lines, sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, os.environ["TMPDIR"], flush=True)
child.wait()
"""
SHARED = Path("/dev/shm")
DEADLINE_S = 300


@pytest.fixture
def kept(tmp_path):
    folder, memory = tmp_path / "temporary", tmp_path / "memory"
    folder.mkdir()
    memory.mkdir()
    (memory / "model.safetensors").write_text("weights that the holder was about to load")
    shared = SHARED / f"sglang_loads_of_a_test_{os.getpid()}.shm"
    shared.write_bytes(bytes(4096))
    server = [sys.executable, "-c", SERVER, str(shared)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", keeper.__file__, str(folder), str(memory), *server],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    server, child, where = process.stdout.readline().split()
    assert where == str(folder)
    yield process, (int(server), int(child)), (folder, memory, shared)
    process.stdin.close()
    process.kill()
    process.wait()
    process.stdout.close()
    shared.unlink(missing_ok=True)
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


def test_a_server_that_ends_takes_what_it_started_along(kept):
    process, (server, child), left = kept
    subprocess.run(["kill", "-TERM", str(server)], check=True)
    assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert not alive(child)
    assert not any(each.exists() for each in left)


def test_a_killed_keeper_takes_the_server_along(kept):
    process, (server, _), _ = kept
    process.kill()
    wait_for(lambda: not alive(server))
