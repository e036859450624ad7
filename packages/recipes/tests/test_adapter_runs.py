"""Runs that train an adapter and send nothing else: real Ray, real ranks, real replicas that hold the base."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from offbeat_recipes.config import ArithmeticConfig
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.testing import Command

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("peft")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS = (
    "engine.lora.rank=4",
    "engine.lora.export=adapter",
    "trainer.prompts_per_step=4",
    "trainer.group_size=4",
    "trainer.save_every=1",
    "trainer.validation_prompts=8",
)
RUN_TIMEOUT_S = 420.0
REWARD = """
def even(prompt, completion, row):
    return sum(letter in "02468" for letter in completion) / max(1, len(completion))
"""


def run(folder: Path, *settings: str) -> list[dict[str, float]]:
    """Run to the end and return the metrics of all steps."""
    words = [*settings, f"run_dir={folder}", *SETTINGS]
    Command("train", words, folder.with_name(f"{folder.name}-said") / "train").succeed(RUN_TIMEOUT_S)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check(steps: list[dict[str, float]], folder: Path, base: Path) -> None:
    """Make sure that the sampler is the trainer, and that no byte of the base travelled."""
    assert max(line["mismatch/max_abs_logprob_diff"] for line in steps) <= 1e-4
    adapter = (folder / "final" / "adapter_model.safetensors").stat().st_size
    for line in steps:
        assert line["sync/bytes"] < 1.5 * adapter < (base / "model.safetensors").stat().st_size / 4


def test_after_a_warm_up_and_a_resume_its_model_is_the_base_of_trainer_and_replicas(tmp_path: Path):
    arithmetic = ("task=arithmetic", "warmup.steps=4", "rollout=hf")
    run(tmp_path, *arithmetic, "trainer.steps=2")
    steps = run(tmp_path, *arithmetic, "trainer.steps=4", "resume=auto")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    check(steps, tmp_path, tmp_path / "model")


@pytest.mark.vllm
def test_vllm_follows_a_learning_trainer_while_only_the_adapter_travels(tmp_path: Path):
    base = make_task(ArithmeticConfig(), "", 0).model_folder(tmp_path / "base", 0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{10 + i}+{20 + i}="}) + "\n" for i in range(40)))
    (tmp_path / "reward.py").write_text(REWARD)
    steps = run(
        tmp_path / "run",
        "task=file",
        f"task.train_path={prompts}",
        f"task.validation_path={prompts}",
        f"task.reward={tmp_path / 'reward.py'}:even",
        f"model.path={base}",
        "rollout=vllm",
        "rollout.max_model_len=64",
        "task.max_prompt_tokens=16",
        "sampling.max_tokens=12",
        "warmup.steps=0",
        "trainer.steps=4",
        "engine.optimizer.lr=1e-2",
    )
    assert all(line["train/grad_norm"] > 0 for line in steps)
    check(steps, tmp_path / "run", base)
