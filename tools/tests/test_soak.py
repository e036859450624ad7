"""What the soak finds of processes, and what it makes of that."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    return importlib.import_module("soak")


@pytest.mark.spawns
def test_a_process_that_has_ended_uses_nothing_whether_or_not_anybody_has_asked_for_its_exit_code(soak):
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # over, and still in /proc
    assert soak._used(process.pid) == (0.0, 0, 0)
    process.wait()
    assert soak._used(process.pid) == (0.0, 0, 0)


def test_a_slope_is_told_and_what_happened_before_it_settled_is_not(soak):
    looks = [
        soak.Look(
            step=step, driver_mib=100.0 + step / 1000 + 500 * (step < 200), driver_files=40, driver_threads=30,
            workers_mib=900.0, workers_files=100, workers_threads=60,
        )
        for step in range(1, 1001)
    ]  # fmt: skip
    found = soak.summary(looks, settle=200)
    assert found["driver_mib"]["per_1000_steps"] == pytest.approx(1.0)
    assert found["driver_files"] == {"first": 40.0, "last": 40.0, "per_1000_steps": 0.0}
