"""Whole runs through the command line: real Ray, real ranks, real replicas, in a process that may be killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from offbeat_recipes.testing import Command
from offbeat_trainer.loops.events import Dropped, Issued, Taken
from offbeat_trainer.loops.journal import SqliteJournal

if TYPE_CHECKING:
    from offbeat_recipes.testing.commands import Name

SMALL = (
    "warmup.steps=4",
    "trainer.steps=5",
    "trainer.prompts_per_step=4",
    "trainer.group_size=4",
    "trainer.save_every=2",
    "trainer.validate_every=2",
    "trainer.validation_prompts=8",
)
RUN_TIMEOUT_S = 600.0
ORPHAN_TIMEOUT_S = 300.0
# What depends on the clock and the machine; how much is queued at the end of a step does, in the modes that generate ahead.
CLOCKS = (
    "memory/",
    "time",
    "idle/",
    "buffer/",
    "sync/gb_per_s",
    "sync/pause_s",
    "sync/worst_gap_s",
    "sync/transfer_s",
    "sync/verify_s",
    "sync/flip_s",
)


def words(folder: Path, *settings: str) -> list[str]:
    """Return what follows the name of a command for a small run in `folder`."""
    return ["task=arithmetic", f"run_dir={folder}", *SMALL, *settings]


def begin(folder: Path, *settings: str, name: Name = "train") -> Command:
    """Start a small run in `folder` without waiting for it."""
    return Command(
        name,
        words(folder, *settings),
        folder.with_name(f"{folder.name}-said") / f"{name}-{time.monotonic_ns()}",
    )


def run(folder: Path, *settings: str, name: Name = "train") -> str:
    """Run to the end and return what a person saw."""
    return begin(folder, *settings, name=name).succeed(RUN_TIMEOUT_S)


def history(folder: Path, *, syncs: bool = True) -> list[dict[str, float]]:
    """Return the metrics of each step without what depends on the clock.

    Without `syncs` those of weight syncs are left out: where steps train beside them, the clock decides which step tells of one.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    apart = CLOCKS if syncs else (*CLOCKS, "sync/")
    return [{key: value for key, value in line.items() if not key.startswith(apart)} for line in lines]


def wait_for_steps(command: Command, folder: Path, num_steps: int) -> None:
    """Wait until `num_steps` steps of the run are on record."""
    command.wait_for_steps(folder / "metrics.jsonl", num_steps, RUN_TIMEOUT_S)


def kill_after(folder: Path, num_steps: int, *settings: str) -> None:
    """Start a run and kill its driver with SIGKILL once `num_steps` steps are on record, and a checkpoint is whole."""
    command = begin(folder, *settings)
    wait_for_steps(command, folder, num_steps)
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not any(path.name[5:].isdigit() for path in (folder / "checkpoints" / "policy").glob("step_*")):
        assert time.monotonic() < deadline, "no whole checkpoint"
        time.sleep(0.01)
    command.signal(signal.SIGKILL)
    assert command.wait(RUN_TIMEOUT_S) == -signal.SIGKILL
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


def check_same(one: Path, other: Path, *, syncs: bool = True) -> None:
    """Two runs came to the same, metric by metric."""
    assert history(one, syncs=syncs) == history(other, syncs=syncs)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, other)]
    for key in ("accuracy_before", "accuracy_after", "reward_first", "reward_last", "steps"):
        assert summaries[0][key] == summaries[1][key], key


# Two ranks, two replicas and one thread each: what every test of the synchronous mode compares with.
SYNC = (
    "rollout=hf",
    "rollout.num_replicas=2",
    "rollout.cpu_threads=1",
    "engine.num_ranks=2",
    "engine.threads_per_rank=1",
)

FOUR_HEADS = ("task.hidden_size=128", "task.num_heads=4")  # those of the default model are three
FSDP2 = ("engine=fsdp2",)
MEGATRON = ("engine=megatron", "engine.tensor_parallel_size=2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shared_ray: str) -> Path:
    """The folder of a synchronous run that was left alone."""
    folder = tmp_path_factory.mktemp("sync") / "undisturbed"
    run(folder, *SYNC, shared_ray)
    assert [line["step"] for line in history(folder)] == [1, 2, 3, 4, 5]
    return folder


@pytest.mark.ray
@pytest.mark.deep
def test_a_killed_run_resumes_bit_for_bit_on_two_ranks_and_two_replicas(
    tmp_path: Path, undisturbed: Path, shared_ray: str
):
    folder = tmp_path / "run"
    kill_after(folder, 3, *SYNC, shared_ray)
    assert "from the checkpoint of step" in run(folder, *SYNC, shared_ray, "resume=auto")
    check_same(folder, undisturbed)


@pytest.mark.ray
@pytest.mark.deep
@pytest.mark.parametrize(("first", "second"), [(FSDP2, MEGATRON), (MEGATRON, FSDP2), (MEGATRON, MEGATRON)])
def test_a_killed_run_goes_on_with_the_same_or_another_engine(
    tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...], shared_ray: str
):
    """The steps to come are those of the run that was left alone, and so are its weights: Adam's moments moved, too."""
    settings = (*SYNC, *FOUR_HEADS, shared_ray)
    run(tmp_path / "whole", *settings, *first)
    kill_after(tmp_path / "moved", 3, *settings, *first)
    assert "from the checkpoint of step" in run(tmp_path / "moved", *settings, *second, "resume=auto")
    whole, moved = history(tmp_path / "whole"), history(tmp_path / "moved")
    for key in ("step", "train/loss", "train/grad_norm", "reward/mean"):
        assert [line[key] for line in moved] == pytest.approx([line[key] for line in whole], abs=1e-6), key
    one, other = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "moved"))
    torch.testing.assert_close(other, one, rtol=0, atol=1e-6)


@pytest.mark.ray
@pytest.mark.deep
def test_colocated_is_separate_bit_for_bit(tmp_path: Path, undisturbed: Path, shared_ray: str):
    run(tmp_path / "shared", *SYNC, shared_ray, "cluster.placement=colocated")
    check_same(tmp_path / "shared", undisturbed)


@pytest.mark.ray
def test_a_killed_asynchronous_run_resumes_bit_for_bit_where_timing_decides_nothing(
    tmp_path: Path, shared_ray: str
):
    settings = ("rollout=hf", "mode=fully_async", "mode.order=first_in", "mode.partial=wait", shared_ray)
    run(tmp_path / "whole", *settings)
    kill_after(tmp_path / "killed", 3, *settings)
    assert "from the checkpoint of step" in run(tmp_path / "killed", *settings, "resume=auto")
    check_same(tmp_path / "killed", tmp_path / "whole", syncs=False)
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
    assert history(tmp_path / "again", syncs=False) == history(tmp_path / "whole", syncs=False)


@pytest.mark.ray
def test_a_run_whose_training_rank_dies_says_so_and_goes_on_later_until_it_is_terminated(
    tmp_path: Path, shared_ray: str
):
    folder = tmp_path / "run"
    settings = ("rollout=hf", "mode=fully_async", "trainer.steps=1000", "trainer.save_every=2", shared_ray)
    command = begin(folder, *settings, "rollout.num_replicas=2", "engine.micro_batch_tokens=512")
    wait_for_steps(command, folder, 3)
    owners = [pid for pid in os.listdir("/proc") if pid.isdigit()]
    (rank,) = [int(pid) for pid in owners if _has_open(pid, folder / "logs" / "train_rank0.log")]
    os.kill(rank, signal.SIGKILL)
    assert command.wait(RUN_TIMEOUT_S) == 1
    assert "training rank 0 died while it should" in command.complained
    assert "resume=auto" in command.complained
    wait_for_orphans(folder)
    steps = len(history(folder))

    # What was lost is made up for otherwise: a rank more, a replica less, smaller micro-batches.
    smaller = ("engine.num_ranks=2", "rollout.num_replicas=1", "engine.micro_batch_tokens=256")
    command = begin(folder, *settings, *smaller, "resume=auto")
    wait_for_steps(command, folder, steps + 2)
    command.signal(signal.SIGTERM)
    assert command.wait(RUN_TIMEOUT_S) == 130, (
        "SIGTERM ends a run like Ctrl-C: after its step, with a checkpoint"
    )
    assert "from the checkpoint of step" in command.said
    assert "resume=auto" in command.said
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    assert [line["step"] for line in history(folder)] == list(range(1, steps + 1))
    journal = SqliteJournal(folder / "checkpoints" / "journal.sqlite")
    events = list(journal.events())
    journal.close()
    taken = {event.step: event.indices for event in events if isinstance(event, Taken)}
    trained = [index for indices in taken.values() for index in indices]
    assert len(trained) == len(set(trained)) == steps * 4
    begun = {event.index for event in events if isinstance(event, Issued)} | set(trained)
    assert begun == set(range(len(begun)))
    assert not [event for event in events if isinstance(event, Dropped)]


@pytest.mark.vllm
@pytest.mark.deep
def test_a_killed_asynchronous_run_with_vllm_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path, shared_ray: str
):
    folder = tmp_path / "run"
    settings = ("mode=fully_async", "mode.max_staleness=1", shared_ray)
    kill_after(folder, 2, *settings)
    run(folder, *settings, "resume=auto")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert max(line["staleness/max"] for line in lines) == 1
    assert lines[-1]["buffer/consumed_groups"] == 5 * 4
    assert not [key for key in lines[-1] if key.startswith("buffer/dropped")]
    journal = SqliteJournal(folder / "checkpoints" / "journal.sqlite")
    taken = {event.step: event.indices for event in journal.events() if isinstance(event, Taken)}
    journal.close()
    assert sorted(index for indices in taken.values() for index in indices) == list(range(5 * 4))


@pytest.fixture(scope="module")
def with_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with vLLM, started as a person starts it."""
    program, folder = Path(sys.executable).parent / "offbeat-train", tmp_path_factory.mktemp("vllm") / "whole"
    done = subprocess.run(
        [program, *words(folder)], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.vllm
@pytest.mark.deep
def test_a_killed_run_resumes_bit_for_bit_with_vllm(tmp_path: Path, with_vllm: Path, shared_ray: str):
    kill_after(tmp_path / "killed", 3)  # with a Ray of its own, which must not outlive it
    assert "from the checkpoint of step" in run(tmp_path / "killed", shared_ray, "resume=auto")
    check_same(tmp_path / "killed", with_vllm)


@pytest.mark.vllm
def test_vllm_samples_what_is_trained(with_vllm: Path):
    summary = json.loads((with_vllm / "summary.json").read_text())
    assert summary["max_abs_logprob_diff"] <= 1e-4
    assert set(summary["phase_s"]) == {"generate", "reward", "train", "sync"}
    assert summary["sync_gb_per_s"] > 0


@pytest.mark.ray
def test_sft_makes_a_model_that_eval_can_judge(tmp_path: Path, shared_ray: str):
    folder = tmp_path / "run"
    run(folder, "rollout=hf", shared_ray, name="sft")
    assert (folder / "model" / "model.safetensors").exists()
    lines = history(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if {"validation/loss", "accuracy/validation"} <= line.keys()] == [
        2,
        4,
    ]
    summary = json.loads((folder / "summary.json").read_text())
    assert 0 < summary["loss_after"] < summary["loss_before"]
    assert summary["accuracy_after"] == lines[-1]["accuracy/validation"]
    assert list((folder / "tensorboard").iterdir())
    run(folder, "rollout=hf", shared_ray, name="evaluate")  # as the closing lines of the command say
    drawn = ("--step=0", "--samples=2", "--temperature=1")
    run(folder, "rollout=hf", shared_ray, *drawn, name="evaluate")
    result = json.loads((folder / "evaluations" / "step_0.json").read_text())
    assert (result["prompts"], result["samples_per_prompt"]) == (8, 2)
    (folder / "model").rename(tmp_path / "model")  # as where Ctrl-C came before the end
    run(folder, "rollout=hf", shared_ray, name="evaluate")
    result = json.loads((folder / "evaluations" / "step_4.json").read_text())
    assert result["accuracy"] == summary["accuracy_after"]


@pytest.mark.ray
@pytest.mark.deep
def test_supervised_training_that_was_stopped_goes_on_to_the_bit(tmp_path: Path, shared_ray: str):
    sft = ("--loss-only", "warmup.steps=30", "engine.num_ranks=2", shared_ray)
    run(tmp_path / "whole", *sft, name="sft")
    stopped = begin(tmp_path / "parted", *sft, name="sft")
    wait_for_steps(stopped, tmp_path / "parted", 3)
    stopped.signal(signal.SIGINT)
    assert stopped.wait(RUN_TIMEOUT_S) == 130
    assert re.search(r"offbeat'? sft --loss-only --config", " ".join(stopped.said.split()))
    assert 3 <= len(history(tmp_path / "parted")) < 30
    assert not (tmp_path / "parted" / "model").exists()
    assert "from the checkpoint of step" in run(tmp_path / "parted", *sft, "resume=auto", name="sft")
    assert history(tmp_path / "parted") == history(tmp_path / "whole")
    both = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parted")]
    assert both[0]["loss_before"] == both[1]["loss_before"] > both[0]["loss_after"] == both[1]["loss_after"]


@pytest.mark.ray
@pytest.mark.deep
def test_ctrl_c_while_a_run_starts_is_answered_and_waits_for_no_replica(tmp_path: Path, shared_ray: str):
    folder = tmp_path / "run"
    starting = begin(folder, "rollout=hf", shared_ray)
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while "training rank(s)" not in starting.said:
        assert time.monotonic() < deadline
        assert starting.poll() is None, starting.complained
        time.sleep(0.01)
    starting.signal(signal.SIGINT)
    assert starting.wait(RUN_TIMEOUT_S) == 130
    assert "stopping" in starting.said
    assert "did not stop by itself" not in (folder / "logs" / "driver.log").read_text()
