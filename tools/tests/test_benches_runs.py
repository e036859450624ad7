"""Benches of whole runs, through the command: the whole path of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench_runs import BENCH, DEEP, ENVIRONMENT, FIGURES, MARKS, RAY, TIMEOUT_S, VLLM, assert_published, bench
from runner import descendants

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = MARKS


@pytest.mark.parametrize(
    "adapter", [pytest.param("hf", marks=RAY), pytest.param("vllm", marks=(*RAY, *VLLM, DEEP))]
)
def test_a_step(adapter):
    answer = bench("step", "--json", "--smallest", "--no-trl", "--adapters", adapter)
    small = answer["small"]
    assert small[f"{adapter}_s"] > 0
    assert small["steps_counted"] == {adapter: 1}
    assert small["phases"][adapter].keys() == {"generate", "reward", "train", "sync"}
    assert small["parameters"] == 333_184
    measured = {name for name, figure in FIGURES["step"].items() if figure.has(answer)}
    assert measured == {f"small_{adapter}_s"}


@pytest.mark.parametrize("adapter", ["hf", pytest.param("vllm", marks=(*VLLM, DEEP))])
@pytest.mark.ray
@pytest.mark.slow
def test_the_first_step_is_seen(adapter):
    answer = bench("first_step", "--json", "--smallest", "--adapters", adapter)
    assert answer.keys() == {f"{adapter}_first_step_s", "runs", "machine"}
    assert len(answer["runs"][adapter]) == 1
    assert FIGURES["first_step"][f"{adapter}_first_step_s"].has(answer)


@pytest.mark.ray
@pytest.mark.slow
def test_modes_through_the_command():
    answer = bench("modes", "--json", "--smallest", "--only", "real", "--rollout", "hf")
    assert (
        answer["tokens_per_s"].keys() == answer["layouts"].keys() == {"sync", "one_step_off", "fully_async"}
    )
    assert_published(answer, "modes")
    assert {"async_over_best_sync", "journal_share_real"} <= answer.keys()


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_is_killed_and_goes_on():
    size = (
        "--kills",
        "1",
        "--steps-per-kill",
        "20",
        "--spread-s",
        "0.1",
        "--victims",
        "driver",
        "--replicas",
        "1",
    )
    answer = bench("chaos", "--json", "--rollout", "hf", *size)
    counts = ("lost", "duplicated", "zero_reward_pollution", "unresumed", "orphans", "steps", "groups")
    assert [answer[name] for name in counts] == [0, 0, 0, 0, 0, 40, 320]
    assert answer["kills"] == {"driver": 1}


@pytest.mark.ray
@pytest.mark.slow
def test_a_long_run_is_looked_at_and_its_curve_drawn(tmp_path):
    size = ("--steps", "40", "--settle", "2", "--poll-s", "0.02")
    answer = bench("soak", "--json", *size, "--keep", str(tmp_path / "soak"))
    assert answer["steps"] == 40
    for name in (
        "driver_mib",
        "driver_files",
        "driver_threads",
        "workers_mib",
        "workers_files",
        "workers_threads",
    ):
        assert answer[name]["first"] > 0
    script = [sys.executable, str(BENCH / "curves.py"), f"fully_async={tmp_path / 'soak' / 'run'}"]
    drawn = subprocess.run(script, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert drawn.returncode == 0, drawn.stderr
    assert "| fully_async | run | " in drawn.stdout
    assert drawn.stdout.count("xychart-beta") == 2


def started(pid: int) -> str:
    """Return when a process started, which tells it from a later one of the same number; "" where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name leaves room for those of sockets in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.ray
@pytest.mark.slow
def test_ctrl_c_ends_a_bench_and_all_that_it_started(tmp_path, short_path):
    """The signal goes to the one process that a person started: `all.py`, two processes above the driver of a run."""
    command = [sys.executable, str(BENCH / "all.py"), "--smallest", "--only", "modes"]
    environment = {**os.environ, **ENVIRONMENT, "TMPDIR": str(short_path)}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + TIMEOUT_S
    family: dict[int, str] = {}
    try:
        while not any(
            "ray::" in command_of(pid) for pid in family
        ):  # a worker: Ray's own processes are there
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
            family = {pid: started(pid) for pid in descendants(process.pid)}
        assert any("raylet" in command_of(pid) for pid in family)
        assert len(family) >= 6
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        deadline = time.monotonic() + TIMEOUT_S
        while left := {
            pid: command_of(pid) for pid, since in family.items() if since and started(pid) == since
        }:  # the last is waited for by nobody: it may be on its way
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        assert [path.name for path in short_path.glob("offbeat-*")] == []
    finally:
        process.kill()
        process.wait()


@pytest.mark.ray
@pytest.mark.slow
def test_an_algorithm_from_a_model_that_was_warmed_up(tmp_path):
    out = tmp_path / "algorithms.json"
    words = ("--json", "--smallest", "--only", "grpo", "--modes", "sync", "--seeds", "1", "--out", str(out))
    answer = bench("algorithms", *words)
    (run,) = answer["runs"]
    assert (run["algorithm"], run["mode"], run["seed"], run["steps"]) == ("grpo", "sync", 0, 2)
    assert 0 <= run["before"] <= 1
    assert json.loads(out.read_text())["runs"] == answer["runs"]
