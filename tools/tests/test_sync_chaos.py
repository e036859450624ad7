"""`tools/bench/sync_chaos.py`: the sender and receivers killed in the middle of syncs, a few times over each carrier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "bench" / "sync_chaos.py"
TIMEOUT_S = 1800.0
SLOW_START = {"RAY_raylet_start_wait_time_s": "180"}


RAY = (pytest.mark.ray, pytest.mark.slow)
SGLANG = (pytest.mark.vllm, pytest.mark.sglang)


@pytest.mark.deep
@pytest.mark.spawns
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("carrier", "kills", "parties"),
    [
        (["sockets"], 16, 2),
        pytest.param(["ray"], 4, 2, marks=RAY),
        pytest.param(["sglang", "--ways", "group,adapter"], 8, 2, marks=SGLANG),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_nothing_is_lost_corrupt_or_stuck(carrier, kills, parties):
    command = [sys.executable, str(TOOL), "--json", "--kills", str(kills), "--carrier", *carrier]
    environment = {**os.environ, **SLOW_START, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = json.loads(done.stdout.splitlines()[-1])
    assert {name: count[name] for name in ("kills", "killed_receivers", "lost", "corrupt", "stuck")} == {
        "kills": kills, "killed_receivers": kills // 2, "lost": 0, "corrupt": 0, "stuck": 0,
    }  # fmt: skip
    assert count["failed_syncs"] > 0
    assert count["good_syncs"] == kills + parties  # one after each, and one with each party before
