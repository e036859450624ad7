"""A rank hands freed memory back while it loads, and keeps it once it trains; and whether its work moves can be seen from outside."""

import json
import os
import subprocess
import sys
import threading
from functools import partial
from types import FunctionType

import pytest

from offbeat_trainer.cluster.waits import LOADING_ENVIRONMENT, moves

CODE = """
import json, sys
from pathlib import Path
from offbeat_trainer.cluster.waits import keep_freed_memory

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

def held_after_use():
    before = resident_mib()
    blocks = [bytearray(8 << 20) for _ in range(16)]  # touched: they are filled with zeros one by one
    for block in blocks:
        block[::4096] = b"1" * len(block[::4096])
    assert resident_mib() - before > 100
    blocks.clear()
    return resident_mib() - before

loading = held_after_use()
keep_freed_memory()
print(json.dumps([loading, held_after_use()]))
"""


@pytest.mark.spawns
def test_memory_is_given_back_while_loading_and_kept_afterwards():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **LOADING_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    loading, training = json.loads(done.stdout)
    assert loading < 30
    assert training > 100


def as_ours(work, *arguments):
    """Run `work` in a thread, as code of a package of ours."""
    ours = FunctionType(work.__code__, {"__name__": "offbeat_engine.work"})
    thread = threading.Thread(target=ours, args=arguments)
    thread.start()
    return thread


def test_a_single_call_that_writes_moves_and_one_that_waits_does_not():
    def write(file, chunks):
        file.writelines(chunks)

    def wait(lock):
        lock.acquire()

    lock = threading.Lock()
    lock.acquire()
    waiting = as_ours(wait, lock)
    assert not moves(num_looks=10)
    chunk = [bytes(1 << 20)]
    with open("/dev/null", "wb", buffering=0) as file:
        # One call, which takes the same chunk until there is none; no line of Python runs meanwhile.
        writing = as_ours(write, file, iter(partial(chunk.__getitem__, 0), None))
        assert moves(num_looks=10_000)
        chunk[0] = None
        writing.join(600)
    lock.release()
    waiting.join(600)
