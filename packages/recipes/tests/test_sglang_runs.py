"""Whole runs whose replica is an SGLang server."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from offbeat_recipes.testing import Command

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.deep,
    pytest.mark.sglang,
]

SETTINGS = (
    "task=arithmetic",
    "rollout=sglang",
    "warmup.steps=8",
    "trainer.prompts_per_step=4",
    "trainer.group_size=4",
    "trainer.validation_prompts=8",
    "trainer.step_timeout_s=800",
)
RUN_TIMEOUT_S = 880.0
# What depends on the clock and the machine, and, in the sixth digit, on who else was in the batch: the kernels that leave a
# row alone are a GPU's. Tokens, losses and gradients are the same to the bit, since the trainer computes log-probs itself.
UNEQUAL = ("memory/", "time", "idle/", "buffer/", "sync/", "mismatch/", "offpolicy/")


def begin(folder: Path, *settings: str) -> Command:
    """Start a run in `folder` without waiting for it."""
    return Command(
        "train",
        [*SETTINGS, f"run_dir={folder}", *settings],
        folder.with_name(f"{folder.name}-said") / "train",
    )


def history(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each step without what is not equal in two runs."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(UNEQUAL)} for line in lines]


def servers_of(folder: Path) -> list[int]:
    """Return the first processes of the SGLang servers of the run in `folder`."""
    found: list[int] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        # The keeper has the same words, behind its own; so has nobody else.
        at = words.index(b"--model-path") + 1 if b"--model-path" in words else 0
        if at and words[at].startswith(f"{folder}/".encode()) and b"-S" not in words:
            found.append(int(pid))
    return found


@pytest.mark.timeout(2000)
def test_the_same_seed_is_the_same_run_and_the_sampler_is_the_trainer(tmp_path: Path, shared_ray: str):
    for name in ("one", "other"):
        begin(tmp_path / name, shared_ray, "trainer.steps=4").succeed(RUN_TIMEOUT_S)
    assert history(tmp_path / "one") == history(tmp_path / "other")
    assert [line["step"] for line in history(tmp_path / "one")] == [1, 2, 3, 4]
    for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["mismatch/max_abs_logprob_diff"] <= 1e-4
    assert not servers_of(tmp_path / "one")


# Of bfloat16's eight bits: the log-probs of one token by two libraries that round each layer's sums in orders of their own.
HALVES_DIFFER = 0.1


@pytest.mark.timeout(1000)
def test_in_bfloat16_the_sampler_is_the_trainer_to_its_rounding(tmp_path: Path, shared_ray: str):
    folder = tmp_path / "run"
    begin(folder, shared_ray, "model.dtype=bfloat16", "trainer.steps=4").succeed(RUN_TIMEOUT_S)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    worst = max(line["mismatch/max_abs_logprob_diff"] for line in lines)
    assert 1e-4 < worst <= HALVES_DIFFER
    assert not servers_of(folder)


@pytest.mark.timeout(1000)
def test_two_ranks_of_a_server_are_the_trainer_to_its_rounding(tmp_path: Path, shared_ray: str):
    folder = tmp_path / "run"
    settings = ("rollout.tensor_parallel_size=2", "rollout.cpu_threads=1", "trainer.steps=4")
    begin(folder, shared_ray, *settings).succeed(RUN_TIMEOUT_S)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert max(line["mismatch/max_abs_logprob_diff"] for line in lines) <= 1e-4
    assert not servers_of(folder)


@pytest.mark.timeout(1000)
def test_a_replica_on_the_trainer_s_devices_rests_while_it_trains(tmp_path: Path, shared_ray: str):
    folder = tmp_path / "run"
    begin(folder, shared_ray, "cluster.placement=colocated", "trainer.steps=4").succeed(RUN_TIMEOUT_S)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert max(line["mismatch/max_abs_logprob_diff"] for line in lines) <= 1e-4
    assert not servers_of(folder)


@pytest.mark.timeout(2000)
def test_a_killed_server_is_replaced_and_nothing_is_lost(tmp_path: Path, shared_ray: str):
    folder = tmp_path / "run"
    command = begin(folder, shared_ray, "mode=fully_async", "trainer.steps=30")
    command.wait_for_steps(folder / "metrics.jsonl", 2, RUN_TIMEOUT_S)
    doomed = servers_of(folder)
    assert len(doomed) == 1
    os.kill(doomed[0], signal.SIGKILL)
    command.succeed(RUN_TIMEOUT_S)
    assert [line["step"] for line in history(folder)] == list(range(1, 31))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["buffer/consumed_groups"] == 30 * 4
    assert not [key for key in lines[-1] if key.startswith("buffer/dropped")]
    drawn = {str(event.get("name")) for event in json.loads((folder / "trace.json").read_text())}
    assert any(name.startswith("lost: ") for name in drawn), "the run was over before the server was missed"
    assert "start anew" in drawn
    assert not servers_of(folder)
