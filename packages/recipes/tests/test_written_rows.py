"""Runs that learn from written rows, through the command line: real Ray, real ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_recipes.testing import Command

PAIRS = Path(__file__).parents[3] / "examples" / "pairs.py"
RUN_TIMEOUT_S = 600.0


def run(name: str, folder: Path, *words: str) -> list[dict[str, float]]:
    """Run a command in `folder` to its end and return its metrics, clocks apart."""
    Command(name, [f"run_dir={folder}", *words], folder.with_name("said") / name).succeed(RUN_TIMEOUT_S)
    return history(folder)


def history(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith(("time", "memory/"))}
        for line in lines
    ]


def summary(folder: Path) -> dict[str, float]:
    return json.loads((folder / "summary.json").read_text())


def dpo(folder: Path, *settings: str) -> list[str]:
    files = [f"task.train_path={folder}/train.jsonl", f"task.validation_path={folder}/test.jsonl"]
    return [
        "task=pairs",
        "algorithm=dpo",
        *files,
        "rollout.max_model_len=64",
        "trainer.prompts_per_step=8",
        *settings,
    ]


@pytest.mark.ray
def test_pairs_are_learned_and_a_stopped_run_goes_on_to_the_bit(tmp_path: Path, shared_ray: str):
    subprocess.run(
        [sys.executable, PAIRS, "100", tmp_path / "train.jsonl", "32", tmp_path / "test.jsonl"], check=True
    )
    start = tmp_path / "start"
    run("sft", start, "--loss-only", "task=arithmetic", "warmup.steps=30", shared_ray)
    words = dpo(
        tmp_path, f"model.path={start}/model", "algorithm.beta=0.5", "engine.optimizer.lr=1e-3", "engine.num_ranks=2",
        "engine.micro_batch_tokens=200", "trainer.updates_per_step=2", "trainer.epochs=1", shared_ray,
    )  # fmt: skip
    steps = run("train", tmp_path / "whole", *words)
    said = (tmp_path / "said" / "train.out").read_text()
    assert "offbeat eval" not in said, "it would refuse pairs"
    assert "on held-out rows" in said
    config = ["--config", f"{tmp_path}/whole/config.yaml", f"run_dir={tmp_path}/whole"]
    asked = Command("evaluate", config, tmp_path / "said" / "evaluate")
    assert asked.wait(RUN_TIMEOUT_S) == 2, "refused before anything starts"
    assert "pairs say which of two completions is better" in asked.complained
    assert [line["step"] for line in steps] == list(range(1, 13)), "an epoch of 100 rows has 12 steps of 8"
    assert summary(tmp_path / "whole")["loss_before"] == pytest.approx(0.6931, abs=1e-3)
    assert summary(tmp_path / "whole")["loss_after"] < 0.6
    assert summary(tmp_path / "whole")["accuracy_after"] > 0.6
    assert steps[-1]["dpo/reward_margin"] > 0.1
    assert (tmp_path / "whole" / "final" / "model.safetensors").exists()
    parted = [f"run_dir={tmp_path / 'parted'}", *words]
    stopped = Command("train", parted, tmp_path / "said" / "stopped")
    stopped.wait_for_steps(tmp_path / "parted" / "metrics.jsonl", 3, RUN_TIMEOUT_S)
    stopped.signal(signal.SIGINT)
    assert stopped.wait(RUN_TIMEOUT_S) == 130, stopped.said + stopped.complained
    assert run("train", tmp_path / "parted", *words, "resume=auto") == steps
