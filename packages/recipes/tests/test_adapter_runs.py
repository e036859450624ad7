"""Runs that train an adapter and send nothing else: real Ray, real ranks, real replicas that hold the base."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING

import pytest

from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import ArithmeticConfig
from offbeat_recipes.testing import Command

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_recipes.testing.commands import Name

pytest.importorskip("peft")

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SETTINGS = (
    "engine.lora.rank=4",
    "engine.lora.export=adapter",
    "trainer.prompts_per_step=4",
    "trainer.group_size=4",
    "trainer.save_every=1",
    "trainer.validation_prompts=8",
)
RUN_TIMEOUT_S = 600.0
REWARD = """
def even(prompt, completion, row):
    return sum(letter in "02468" for letter in completion) / max(1, len(completion))
"""


def begin(folder: Path, *settings: str, name: Name = "train") -> Command:
    """Start a run in `folder` without waiting for it."""
    log = folder.with_name(f"{folder.name}-said") / f"{name}-{time.monotonic_ns()}"
    return Command(name, [*settings, f"run_dir={folder}", *SETTINGS], log)


def run(folder: Path, *settings: str) -> list[dict[str, float]]:
    """Run to the end and return the metrics of all steps."""
    begin(folder, *settings).succeed(RUN_TIMEOUT_S)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check(steps: list[dict[str, float]], folder: Path, base: Path) -> None:
    """Make sure that the sampler is the trainer, and that no byte of the base travelled."""
    assert max(line["mismatch/max_abs_logprob_diff"] for line in steps) <= 1e-4
    adapter = (folder / "final" / "adapter_model.safetensors").stat().st_size
    for line in steps:
        assert line["sync/bytes"] < 1.5 * adapter < (base / "model.safetensors").stat().st_size / 4


@pytest.mark.deep
def test_after_a_warm_up_and_ctrl_c_its_model_is_the_base_of_trainer_and_replicas(
    tmp_path: Path, shared_ray: str
):
    folder = tmp_path / "run"
    arithmetic = ("task=arithmetic", "warmup.steps=4", "rollout=hf")
    command = begin(folder, *arithmetic, "trainer.steps=1000")
    command.wait_for_steps(folder / "metrics.jsonl", 1, RUN_TIMEOUT_S)
    command.signal(signal.SIGINT, group=True)  # as a terminal does
    assert command.wait(RUN_TIMEOUT_S) == 130, command.complained
    assert "resume=auto" in command.said
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["interrupted"]
    done = summary["steps"]
    assert 1 <= done < 1000
    steps = run(folder, *arithmetic, shared_ray, f"trainer.steps={done + 2}", "resume=auto")
    assert [line["step"] for line in steps] == list(range(1, done + 3))
    check(steps, folder, folder / "model")
    # A checkpoint judged by itself says what the run said of it: same prompts, same weights, greedy.
    said = begin(folder, *arithmetic, shared_ray, name="evaluate").succeed(RUN_TIMEOUT_S)
    result = json.loads((folder / "evaluations" / f"step_{done + 2}.json").read_text())
    assert result["accuracy"] == json.loads((folder / "summary.json").read_text())["accuracy_after"]
    assert "pass at 1" in said


@pytest.mark.parametrize(
    "rollout",
    ["hf", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.deep])],
)
def test_the_sampler_follows_a_learning_trainer_while_only_the_adapter_travels(
    tmp_path: Path, rollout: str, shared_ray: str
):
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
        f"rollout={rollout}",
        shared_ray,
        "rollout.max_model_len=64",
        "task.max_prompt_tokens=16",
        "sampling.max_tokens=12",
        "warmup.steps=0",
        "trainer.steps=4",
        "engine.optimizer.lr=1e-2",
    )
    assert all(line["train/grad_norm"] > 0 for line in steps)
    check(steps, tmp_path / "run", base)
