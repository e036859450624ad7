"""examples/own_loop.py: a loop of one's own, as a whole run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
RUN_TIMEOUT_S = 1200.0


@pytest.mark.ray
@pytest.mark.slow
def test_a_loop_of_ones_own_is_short_and_learns_to_add(tmp_path):
    program = EXAMPLES / "own_loop.py"
    assert len(program.read_text().splitlines()) <= 40
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "run")],
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rewards = [
        float(reward) for reward in re.findall(r"^step \d+: reward (\S+),", done.stdout, flags=re.MULTILINE)
    ]
    assert len(rewards) == 40
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[-1]["train/lr"] >= 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 40
    assert (tmp_path / "run" / "final" / "config.json").exists()
