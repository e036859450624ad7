"""How the tests of benches run one at its smallest size, and what they look for in its answer.

Nothing here looks at a time or a speed. TRL is the one side that is left out: it has an environment of its own. What
differs from another test by its adapter alone is marked deep.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))

from figures import PARTS  # noqa: E402 a script beside others, not a package

FIGURES = {part.name: {figure.name: figure for figure in part.figures} for part in PARTS}
TIMEOUT_S = 1200.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_raylet_start_wait_time_s": "180"}
RAY = (pytest.mark.ray, pytest.mark.slow)
VLLM = (pytest.mark.vllm, pytest.mark.slow)
DEEP = pytest.mark.deep
MARKS = [pytest.mark.spawns, pytest.mark.timeout(TIMEOUT_S + 60)]


def bench(name: str, *arguments: str) -> dict[str, Any]:
    """Run a bench to its end and return its JSON."""
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), *arguments],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    answer = json.loads(done.stdout.splitlines()[-1])
    assert not answer.get("failed")
    return answer


def assert_published(answer: dict[str, Any], part: str, *, but: str = "") -> None:
    """The answer has every figure of `part` that is published, where the table says, but for names that hold `but`."""
    missing = [name for name, figure in FIGURES[part].items() if not figure.has(answer)]
    assert missing == [name for name in FIGURES[part] if but and but in name]
