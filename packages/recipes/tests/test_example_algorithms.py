"""The algorithms under examples/ against their papers' formulas, in plain Python, and whole runs of them."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from offbeat_engine import LossScale
from offbeat_engine.testing import random_batch
from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.plan.algorithm import algorithm_of, algorithm_refusals
from offbeat_recipes.testing import Command

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = {"cispo": "Cispo"}
RUN_TIMEOUT_S = 1200.0


def setting(name):
    return f"algorithm={EXAMPLES / name}.py:{NAMES[name]}"


def made(name, *settings):
    return algorithm_of(compose_run([setting(name), *settings]))


@pytest.mark.parametrize("name", NAMES)
def test_each_is_short_and_passes_the_trial(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40
    for mode in ("sync", "fully_async"):
        assert made(name, f"mode={mode}").check() == []
        assert algorithm_refusals(compose_run([setting(name), f"mode={mode}"])) == ([], True)


def test_cispo_is_the_policy_gradient_with_a_weight_that_ends_at_its_bound():
    loss_fn = made("cispo", "algorithm.clip_high=0.2").loss_fn()
    batch = random_batch(8)
    mask_BT, noise = batch["loss_mask"], torch.Generator().manual_seed(0)
    new_BT, old_BT = (-torch.rand(mask_BT.shape, generator=noise) for _ in range(2))
    new_BT.requires_grad_()
    batch["old_logprobs"] = old_BT
    advantages_B = torch.linspace(-1, 1, 8)
    batch["advantages"] = torch.where(mask_BT, advantages_B[:, None], 0.0)
    num_tokens, cut = int(mask_BT.sum()), 0
    wanted_BT = torch.zeros_like(old_BT)
    for b, t in mask_BT.nonzero().tolist():
        ratio = math.exp(float(new_BT[b, t].detach() - old_BT[b, t]))
        cut += ratio > 1.2
        wanted_BT[b, t] = -min(ratio, 1.2) * float(advantages_B[b]) / num_tokens
    batch = batch.exclude("rollout_logprobs") if "rollout_logprobs" in batch else batch
    scale = LossScale(num_tokens=num_tokens, num_sequences=8)
    output = loss_fn(TensorDict({"logprobs": new_BT}, batch_size=[8]), batch, scale)
    output.loss.backward()
    torch.testing.assert_close(new_BT.grad, wanted_BT)
    assert 0 < cut < num_tokens
    assert float(output.sums["policy/clip_high_fraction"]) == pytest.approx(cut / num_tokens)
    assert "policy/clip_low_fraction" not in output.sums


@pytest.mark.ray
@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_each_learns_to_add(name, tmp_path, shared_ray):
    folder = tmp_path / "run"
    words = [
        "task=arithmetic",
        setting(name),
        "rollout=hf",
        shared_ray,
        "trainer.steps=40",
        f"run_dir={folder}",
    ]
    Command("train", words, tmp_path / "said" / "train").succeed(RUN_TIMEOUT_S)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1


@pytest.mark.ray
@pytest.mark.slow
def test_a_loop_of_ones_own_is_short_and_learns_to_add(tmp_path):
    program = EXAMPLES / "own_loop.py"
    assert len(program.read_text().splitlines()) <= 40
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "run")],
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rewards = [
        float(reward) for reward in re.findall(r"^step \d+: reward (\S+),", done.stdout, flags=re.MULTILINE)
    ]
    assert len(rewards) == 40
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[-1]["train/lr"] >= 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 40
    assert (tmp_path / "run" / "final" / "config.json").exists()
