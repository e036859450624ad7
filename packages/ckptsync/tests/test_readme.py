from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "offbeat_ckptsync"
TEXT = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.fixture
def run_example(tmp_path):
    def run(number):
        script = tmp_path / "example.py"
        script.write_text(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[number])
        # Two processes write to one pipe: each line at once, as Python does where nobody tells it not to buffer.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False, env=env
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.spawns
def test_the_example_of_the_readme_runs(run_example):
    assert re.fullmatch(r"version 1: 1050624 bytes, pause \d+\.\d ms\n", run_example(0))


@pytest.mark.spawns
def test_the_example_of_two_processes_runs(run_example):
    lines = sorted(run_example(1).splitlines())
    served = re.fullmatch(r"replica-0 serves version 3, sum (-?\d+\.\d{3})", lines[0])
    sent = re.fullmatch(r"version 3 reached \['replica-0'\], sum (-?\d+\.\d{3})", lines[1])
    assert served[1] == sent[1]


def test_what_is_to_be_read_first_is_as_short_as_it_says():
    ((folder, names, others, limit),) = re.findall(
        r"begin with `(\w+)` \(([^)]*)\), (.*): under ([\d,]+) lines", TEXT
    )
    first = [f"{folder}/{name}" for name in re.findall(r"`(\w+)`", names)] + re.findall(r"`([\w/]+)`", others)
    assert len(first) == 5
    lines = sum(len((SOURCES / f"{name}.py").read_text().splitlines()) for name in first)
    assert lines < int(limit.replace(",", ""))
