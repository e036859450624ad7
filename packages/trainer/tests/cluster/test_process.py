"""A rank hands freed memory back while it loads, and keeps it once it trains: seen from outside, in a process as a rank is."""

import json
import os
import subprocess
import sys

import pytest

from offbeat_trainer.cluster.process import LOADING_ENVIRONMENT

CODE = """
import json, sys
from pathlib import Path
from offbeat_trainer.cluster.process import keep_freed_memory

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
