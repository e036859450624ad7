"""Whole runs through the command line: real Ray, real ranks, real replicas, in a process that may be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offbeat_trainer.journal.events import Dropped, Issued, Taken
from offbeat_trainer.journal.sqlite import SqliteJournal

SMALL = (
    "warmup.steps=4",
    "trainer.steps=5",
    "trainer.prompts_per_step=4",
    "trainer.group_size=4",
    "trainer.save_every=2",
    "trainer.validate_every=2",
    "trainer.validation_prompts=8",
)
RUN_TIMEOUT_S = 420.0
ORPHAN_TIMEOUT_S = 60.0
# What depends on the clock; how much is queued at the end of a step does, in the modes that generate ahead.
CLOCKS = (
    "time",
    "idle/",
    "buffer/",
    "sync/gb_per_s",
    "sync/pause_s",
    "sync/transfer_s",
    "sync/verify_s",
    "sync/flip_s",
)


def command(folder: Path, *settings: str) -> list[str]:
    """Return the command of a small run in `folder`."""
    program = str(Path(sys.executable).parent / "offbeat-train")
    return [program, "task=arithmetic", f"run_dir={folder}", *SMALL, *settings]


def run(folder: Path, *settings: str) -> str:
    """Run to the end and return what a person saw."""
    done = subprocess.run(
        command(folder, *settings), capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def history(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each step without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(CLOCKS)} for line in lines]


def kill_after(folder: Path, num_steps: int, *settings: str) -> None:
    """Start a run and kill its driver with SIGKILL once `num_steps` steps are on record."""
    process = subprocess.Popen(
        command(folder, *settings),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < num_steps:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run made no steps"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for_orphans(folder)


def wait_for_orphans(folder: Path) -> None:
    """Wait until no process has the run's logs open any more: killing the driver must not leave workers behind."""
    deadline = time.monotonic() + ORPHAN_TIMEOUT_S
    while owners := [pid for pid in os.listdir("/proc") if pid.isdigit() and _has_open(pid, folder / "logs")]:
        assert time.monotonic() < deadline, f"processes {owners} outlive the driver"
        time.sleep(0.2)


def _has_open(pid: str, folder: Path) -> bool:
    try:
        files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any(file.startswith(str(folder)) for file in files)


def check_resume(tmp_path: Path, *settings: str) -> None:
    """Compare a run that was killed after its third step and resumed with one that was left alone."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole, *settings)
    kill_after(killed, 3, *settings)
    assert "from the checkpoint of step" in run(killed, *settings, "resume=auto")
    assert [line["step"] for line in history(whole)] == [1, 2, 3, 4, 5]
    assert history(killed) == history(whole)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (whole, killed)]
    for key in ("accuracy_before", "accuracy_after", "reward_first", "reward_last", "steps"):
        assert summaries[0][key] == summaries[1][key], key


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_bit_for_bit_on_two_ranks_and_two_replicas(tmp_path: Path):
    check_resume(tmp_path, "rollout=hf", "engine.num_ranks=2", "rollout.num_replicas=2")


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_killed_asynchronous_run_resumes_bit_for_bit_where_timing_decides_nothing(tmp_path: Path):
    settings = ("rollout=hf", "mode=fully_async", "mode.order=first_in", "mode.partial=wait")
    check_resume(tmp_path, *settings)
    lines = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["staleness/max"] <= 2 for line in lines)
    assert any(line["staleness/max"] > 0 for line in lines), "nothing ran ahead"
    last = lines[-1]
    assert last["buffer/consumed_groups"] == last["buffer/issued_groups"] == 5 * 4
    summary = json.loads((tmp_path / "killed" / "summary.json").read_text())
    assert summary["mode"] == "fully_async"
    assert summary["where_time_went"]
    json.loads((tmp_path / "killed" / "trace.json").read_text())
    run(tmp_path / "again", *settings, f"replay={tmp_path / 'killed'}")  # its journal is of two processes
    assert history(tmp_path / "again") == history(tmp_path / "whole")


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_colocated_is_separate_bit_for_bit(tmp_path: Path):
    settings = ("rollout=hf", "rollout.cpu_threads=1", "engine.threads_per_rank=1")
    run(tmp_path / "apart", *settings)
    run(tmp_path / "shared", *settings, "cluster.placement=colocated")
    assert [line["step"] for line in history(tmp_path / "shared")] == [1, 2, 3, 4, 5]
    assert history(tmp_path / "shared") == history(tmp_path / "apart")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("apart", "shared")]
    assert summaries[0]["accuracy_after"] == summaries[1]["accuracy_after"]


def begin(folder: Path, *settings: str) -> subprocess.Popen[str]:
    """Start a run without waiting for it."""
    return subprocess.Popen(
        command(folder, *settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(process: subprocess.Popen[str], folder: Path, num_steps: int) -> None:
    """Wait until `num_steps` steps are on record."""
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < num_steps:
        assert process.poll() is None, f"the run ended before step {num_steps}"
        assert time.monotonic() < deadline, "the run made no steps"
        time.sleep(0.02)


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_run_whose_training_rank_dies_says_so_and_goes_on_later_until_it_is_terminated(tmp_path: Path):
    folder = tmp_path / "run"
    settings = ("rollout=hf", "mode=fully_async", "trainer.steps=1000", "trainer.save_every=2")
    process = begin(folder, *settings)
    wait_for_steps(process, folder, 3)
    owners = [pid for pid in os.listdir("/proc") if pid.isdigit()]
    (rank,) = [int(pid) for pid in owners if _has_open(pid, folder / "logs" / "train_rank0.log")]
    os.kill(rank, signal.SIGKILL)
    _, failed = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 1
    assert "training rank 0 died while it should" in failed
    assert "resume=auto" in failed
    wait_for_orphans(folder)
    steps = len(history(folder))

    process = begin(folder, *settings, "resume=auto")
    wait_for_steps(process, folder, steps + 2)
    os.kill(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 130, "SIGTERM ends a run like Ctrl-C: after its step, with a checkpoint"
    assert "from the checkpoint of step" in said
    assert "resume=auto" in said
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    assert [line["step"] for line in history(folder)] == list(range(1, steps + 1))
    journal = SqliteJournal(folder / "checkpoints" / "journal.sqlite")
    events = list(journal.events())
    journal.close()
    taken = {event.step: event.indices for event in events if isinstance(event, Taken)}
    trained = [index for indices in taken.values() for index in indices]
    assert len(trained) == len(set(trained)) == steps * 4
    begun = {event.index for event in events if isinstance(event, Issued)}
    assert begun == set(range(len(begun)))
    assert set(trained) <= begun
    assert not [event for event in events if isinstance(event, Dropped)]


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_killed_asynchronous_run_with_vllm_loses_nothing_and_trains_nothing_twice(tmp_path: Path):
    folder = tmp_path / "run"
    kill_after(folder, 2, "mode=fully_async", "mode.max_staleness=1")
    run(folder, "mode=fully_async", "mode.max_staleness=1", "resume=auto")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert max(line["staleness/max"] for line in lines) == 1
    assert lines[-1]["buffer/consumed_groups"] == 5 * 4
    assert not [key for key in lines[-1] if key.startswith("buffer/dropped")]
    journal = SqliteJournal(folder / "checkpoints" / "journal.sqlite")
    taken = {event.step: event.indices for event in journal.events() if isinstance(event, Taken)}
    journal.close()
    assert sorted(index for indices in taken.values() for index in indices) == list(range(5 * 4))


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_bit_for_bit_with_vllm(tmp_path: Path):
    check_resume(tmp_path)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["max_abs_logprob_diff"] <= 1e-4
    assert set(summary["phase_s"]) == {"generate", "reward", "train", "sync"}
    assert summary["sync_gb_per_s"] > 0


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_ctrl_c_ends_after_the_step_and_says_how_to_go_on(tmp_path: Path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command(folder, "rollout=hf", "trainer.steps=1000"),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not metrics.exists() or not metrics.read_text().strip():
        assert time.monotonic() < deadline, "the run made no steps"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 130
    assert "resume=auto" in said
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["interrupted"]
    steps = summary["steps"]
    assert steps < 1000
    run(folder, "rollout=hf", f"trainer.steps={steps + 1}", "resume=auto")
    assert history(folder)[-1]["step"] == steps + 1
    # A checkpoint judged by itself says what the run said of it: same prompts, same weights, greedy.
    program = Path(sys.executable).parent / "offbeat-eval"
    judge = [program, "task=arithmetic", f"run_dir={folder}", *SMALL, "rollout=hf"]
    judged = subprocess.run(judge, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert judged.returncode == 0, judged.stderr
    result = json.loads((folder / "evaluations" / f"step_{steps + 1}.json").read_text())
    assert result["accuracy"] == json.loads((folder / "summary.json").read_text())["accuracy_after"]
    assert "solved at least once" in judged.stdout


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_sft_makes_a_model_that_eval_can_judge(tmp_path: Path):
    folder = tmp_path / "run"
    bin_folder = Path(sys.executable).parent
    common = [f"run_dir={folder}", "rollout=hf", *SMALL]
    sft = subprocess.run(
        [bin_folder / "offbeat-sft", *common],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert sft.returncode == 0, sft.stderr
    assert (folder / "model" / "model.safetensors").exists()
    judged = subprocess.run(
        [
            bin_folder / "offbeat-eval",
            *common,
            "evaluation.step=0",
            "evaluation.num_samples=2",
            "evaluation.temperature=1",
        ],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert judged.returncode == 0, judged.stderr
    result = json.loads((folder / "evaluations" / "step_0.json").read_text())
    assert (result["prompts"], result["samples_per_prompt"]) == (8, 2)
