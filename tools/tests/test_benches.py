"""Every bench in tools/bench, its whole path at the smallest size: which figures come, and whether its counts are right.

Nothing here looks at a time or a speed. TRL is the one side that is left out: it has an environment of its own. What
differs from another test by its adapter alone is marked deep.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))

from figures import PARTS  # noqa: E402 a script beside others, not a package
from runner import descendants  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

FIGURES = {part.name: {figure.name: figure for figure in part.figures} for part in PARTS}
TIMEOUT_S = 1200.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_raylet_start_wait_time_s": "180"}
RAY = (pytest.mark.ray, pytest.mark.slow)
VLLM = (pytest.mark.vllm, pytest.mark.slow)
DEEP = pytest.mark.deep

pytestmark = [pytest.mark.spawns, pytest.mark.timeout(TIMEOUT_S + 60)]


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


def test_the_engine_beside_plain_loops():
    answer = bench("engine", "--json", "--smallest")
    assert_published(answer, "engine")
    assert_published(answer, "engine_memory")
    assert answer["offload_ok"] is True
    assert 0 < answer["mean_over_max_length"] < 1
    assert answer["checkpoint_mib"] > answer["load_files_mib"] > 0


@pytest.mark.slow
def test_the_megatron_engine_beside_a_bare_loop():
    answer = bench("engine", "--json", "--smallest", "--engine", "megatron")
    assert_published(answer, "megatron")
    assert {"load_peak_ratio", "engine_export_peak_ratio"} <= answer.keys()


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


def test_modes_without_processes_of_a_run():
    answer = bench("modes", "--json", "--smallest", "--only", "paced,driver,rewards")
    for part in ("paced", "driver", "rewards"):
        assert_published(answer, part)
    assert (answer["samples"], answer["tokens"]) == (2 * 250 * 8, 4 * 8 * 8192)


@pytest.mark.ray
@pytest.mark.slow
def test_modes_through_the_command():
    answer = bench("modes", "--json", "--smallest", "--only", "real", "--rollout", "hf")
    assert (
        answer["tokens_per_s"].keys() == answer["layouts"].keys() == {"sync", "one_step_off", "fully_async"}
    )
    assert_published(answer, "modes")
    assert {"async_over_best_sync", "journal_share_real"} <= answer.keys()


def test_syncs_of_each_transport():
    answer = bench("sync", "--json", "--smallest", "--only", "shm,shm_adopted,broadcast,disk,bound")
    assert answer["shm"]["24 tensors"].keys() == {"1", "4"}
    for transport in ("shm_adopted", "broadcast", "disk"):
        assert answer[transport]["24 tensors"].keys() == {"1"}
    assert_published(answer, "sync", but="_400")


@pytest.mark.vllm
@pytest.mark.slow
def test_syncs_into_vllm_and_by_its_own_cycle():
    answer = bench("sync", "--json", "--smallest", "--only", "vllm,small")
    assert_published(answer, "sync_vllm")
    for side in answer["vllm"]["sides"].values():
        assert side["tokens"] >= side["requests"] == 8


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("part", ["vllm", pytest.param("sglang,seeds", marks=(pytest.mark.sglang, DEEP))])
def test_adapters_beside_bare_engines(part):
    answer = bench("rollout", "--json", "--pairs", "1", "--requests", "2", "--tokens", "4", "--only", part)
    assert answer["engines"].keys() == set(part.split(","))
    assert_published(answer, f"rollout_{part.partition(',')[0]}")
    assert all(len(engine["ratios"]) == 1 for engine in answer["engines"].values())


@pytest.mark.parametrize("carrier", ["sockets", pytest.param("ray", marks=(*RAY, DEEP))])
def test_a_sender_and_a_receiver_are_killed(carrier):
    answer = bench("sync_chaos", "--json", "--kills", "2", "--transport", "shm", "--carrier", carrier)
    counts = {
        name: answer[name] for name in ("kills", "killed_receivers", "lost", "corrupt", "stuck", "good_syncs")
    }
    assert counts == {
        "kills": 2, "killed_receivers": 1, "lost": 0, "corrupt": 0, "stuck": 0, "good_syncs": 3,
    }  # fmt: skip
    assert_published(answer, "sync_chaos")


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
        assert {
            pid: command_of(pid) for pid, since in family.items() if since and started(pid) == since
        } == {}
        assert [path.name for path in short_path.glob("offbeat-*")] == []
    finally:
        process.kill()
        process.wait()
