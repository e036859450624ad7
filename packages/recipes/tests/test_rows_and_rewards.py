"""Every algorithm that learns from written rows, and those that follow it, through the command line: real Ray, real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_recipes.testing import Command

PAIRS = Path(__file__).parents[3] / "examples" / "pairs.py"
RUN_TIMEOUT_S = 900.0
pytestmark = [pytest.mark.deep, pytest.mark.ray]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, shared_ray: str) -> Path:
    """A folder with pairs of sums, `train.jsonl` and `test.jsonl`, and a model that adds now and then, `sft/model`."""
    folder = tmp_path_factory.mktemp("start")
    subprocess.run(
        [sys.executable, PAIRS, "200", folder / "train.jsonl", "64", folder / "test.jsonl"], check=True
    )
    _run("sft", folder / "sft", "--loss-only", "task=arithmetic", "warmup.steps=150", shared_ray)
    return folder


def _run(name: str, folder: Path, *words: str) -> dict[str, float]:
    """Run a command to its end; return its last metrics, and what its summary says of before and after."""
    Command(name, [f"run_dir={folder}", *words], folder.with_name(f"said-{folder.name}")).succeed(
        RUN_TIMEOUT_S
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    found = {
        **lines[-1],
        **{key: value for key, value in summary.items() if key.endswith(("before", "after"))},
    }
    shown = {key: value for key, value in found.items() if "loss_" in key or "accuracy" in key}
    print(folder.name, shown)
    return found


def _pairs(start: Path) -> list[str]:
    files = [f"task.train_path={start}/train.jsonl", f"task.validation_path={start}/test.jsonl"]
    return [
        "task=pairs",
        *files,
        f"model.path={start}/sft/model",
        "rollout.max_model_len=64",
        "engine.optimizer.lr=1e-3",
    ]


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("dpo", ["algorithm.loss=ipo", "algorithm.beta=0.5"]),
        ("dpo", ["algorithm.loss=apo_zero", "algorithm.beta=0.5", "algorithm.sft_coef=0.1"]),
        ("simpo", []),
        ("orpo", ["algorithm.odds_coef=1"]),
        ("cpo", []),
        ("kto", ["algorithm.beta=0.5"]),
    ],
)
def test_held_out_preferences_are_learned(
    algorithm: str, settings: list[str], start: Path, tmp_path: Path, shared_ray: str
):
    steps = ["trainer.prompts_per_step=16", "trainer.steps=24", f"algorithm={algorithm}", *settings]
    found = _run("train", tmp_path / algorithm, *_pairs(start), *steps, shared_ray)
    assert found["loss_after"] < found["loss_before"]
    assert found["accuracy_after"] > 0.8


def test_a_reward_model_is_trained_and_is_the_reward_of_a_run(start: Path, tmp_path: Path, shared_ray: str):
    steps = ["algorithm=reward_model", "trainer.prompts_per_step=16", "trainer.steps=36"]
    found = _run("train", tmp_path / "judge", *_pairs(start), *steps, shared_ray)
    assert found["accuracy_after"] > 0.9
    words = [
        *_pairs(start), "algorithm=grpo", "rollout=hf", f"reward.model={tmp_path}/judge/final", "sampling.max_tokens=24", "task.max_prompt_tokens=16",
        "trainer.prompts_per_step=8", "trainer.group_size=8", "trainer.validation_prompts=0", "trainer.steps=12", shared_ray,
    ]  # fmt: skip
    _run("train", tmp_path / "rl", *words)
    lines = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines]
    print("rewards", [round(one, 2) for one in rewards])
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_a_weak_policy_comes_closer_to_its_teacher_by_whole_distributions(
    start: Path, tmp_path: Path, shared_ray: str
):
    _run("sft", tmp_path / "weak", "--loss-only", "task=arithmetic", "warmup.steps=20", shared_ray)
    words = [
        "task=arithmetic", f"model.path={tmp_path}/weak/model", "algorithm=distill", "algorithm.divergence=jsd", "algorithm.top_k=12",
        f"algorithm.teacher_path={start}/sft/model", "rollout=hf", "engine.optimizer.lr=1e-3", "trainer.prompts_per_step=16",
        "trainer.group_size=2", "trainer.validation_prompts=0", "trainer.steps=16", "engine.num_ranks=2", "warmup.steps=0", shared_ray,
    ]  # fmt: skip
    _run("train", tmp_path / "distill", *words)
    lines = [json.loads(line) for line in (tmp_path / "distill" / "metrics.jsonl").read_text().splitlines()]
    apart = [line["distill/divergence_nats"] for line in lines]
    print("divergence", [round(one, 4) for one in apart])
    assert sum(apart[-3:]) < 0.8 * sum(apart[:3])


def test_the_best_samples_are_learned(start: Path, tmp_path: Path, shared_ray: str):
    words = [
        "task=arithmetic", f"model.path={start}/sft/model", "algorithm=rejection", "algorithm.min_reward=1",
        "rollout=hf", "engine.optimizer.lr=1e-3", "trainer.prompts_per_step=16", "trainer.group_size=8",
        "trainer.validation_prompts=64", "trainer.validate_every=0", "trainer.steps=16", shared_ray,
    ]  # fmt: skip
    found = _run("train", tmp_path / "rejection", *words)
    assert found["accuracy_after"] > found["accuracy_before"] + 0.1
