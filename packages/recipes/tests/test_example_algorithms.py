"""The algorithms under examples/ against their papers' formulas, in plain Python, and whole runs of them."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.plan.algorithm import algorithm_of, algorithm_refusals
from offbeat_recipes.testing import Command
from offbeat_rollout import Completion, Finish
from offbeat_trainer.data.assemble import assemble
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = {
    "dapo": "Dapo", "reinforce_pp": "ReinforcePlusPlus", "remax": "ReMax", "adaptive_kl": "AdaptiveKl",
}  # fmt: skip
RUN_TIMEOUT_S = 1200.0


def setting(name):
    return f"algorithm={EXAMPLES / name}.py:{NAMES[name]}"


def made(name, *settings):
    return algorithm_of(compose_run([setting(name), *settings]))


def group(uid, rewards, finishes=None):
    return Group(
        prompt=Prompt(uid=uid, text="", token_ids=(1, 2)),
        trajectories=tuple(
            Trajectory.of(
                Completion.of(
                    request_id=f"{uid}/{index}",
                    token_ids=(3,) * (index + 1),
                    logprobs=(-1.0,) * (index + 1),
                    policy_versions=(1,) * (index + 1),
                    finish=finish,
                )
            )
            for index, finish in enumerate(finishes or [Finish.STOP] * len(rewards))
        ),
        scores=tuple(Score(reward=reward, correct=None) for reward in rewards),
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_is_short_and_passes_the_trial(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40
    for mode in ("sync", "fully_async"):
        assert made(name, f"mode={mode}").check() == []
        assert algorithm_refusals(compose_run([setting(name), f"mode={mode}"])) == ([], True)


def test_dapo_leaves_out_flat_groups_and_what_was_cut_off():
    dapo = made("dapo")
    assert [dapo.keeps(group("p", rewards)) for rewards in ((1, 1), (0, 0), (0, 1))] == ["flat", "flat", ""]
    assert made("dapo", "algorithm.dynamic_sampling=false").keeps(group("p", (1, 1))) == ""
    groups = [
        group("p", (0, 1), (Finish.LENGTH, Finish.STOP)),
        group("q", (1, 0), (Finish.STOP, Finish.LENGTH)),
    ]
    batch = assemble(groups, dapo.targets(groups), temperature=1.0)
    assert batch["loss_mask"].sum(1).tolist() == [0, 2, 1, 0]
    plain = algorithm_of(compose_run([])).targets(groups)["advantages"]
    assert torch.equal(dapo.targets(groups)["advantages"], plain)


def test_reinforce_plus_plus_compares_rewards_over_the_whole_batch():
    algorithm = made("reinforce_pp", "trainer.group_size=1")
    rewards = [0.0, 1.0, 5.0, 2.0]
    mean = sum(rewards) / 4
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 4)
    advantages = algorithm.targets([group(str(reward), (reward,)) for reward in rewards])["advantages"]
    assert advantages.tolist() == pytest.approx([(reward - mean) / std for reward in rewards])
    assert algorithm.targets([group("p", (2.0, 2.0))])["advantages"].tolist() == [0, 0]
    assert algorithm.check() == []
    assert made("dapo", "trainer.group_size=1").check() != []


def test_remax_compares_each_completion_with_the_greedy_one_of_its_prompt():
    algorithm = made("remax", "trainer.group_size=1")
    assert (algorithm.baseline(), algorithm.check()) == ({"temperature": 0.0}, [])
    groups = [
        replace(group("p", (1.0, 0.0)), baseline=(Score(reward=0.25),)),
        replace(group("q", (2.0,)), baseline=(Score(reward=2.0),)),
    ]
    assert algorithm.targets(groups)["advantages"].tolist() == [0.75, -0.25, 0.0]


def test_the_kl_coefficient_rises_above_its_target_and_falls_below():
    algorithm = made(
        "adaptive_kl", "algorithm.kl_coef=0.5", "algorithm.kl_target=0.1", "algorithm.kl_gain=0.1"
    )
    assert algorithm.loss_fn().config.kl_coef == 0.5
    high, low, near = (
        algorithm.after({"policy/ref_kl_nats": kl}).state["kl_coef"] for kl in (1.0, 0.0, 0.11)
    )
    assert (high, low, near) == pytest.approx((0.51, 0.49, 0.505))
    later = algorithm.after({"policy/ref_kl_nats": 1.0}).after({"policy/ref_kl_nats": 1.0})
    assert later.loss_fn().config.kl_coef == pytest.approx(0.5 * 1.02**2)
    assert "reference" in later.roles()


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
    assert bool(summary["left_out_groups"]) is (name == "dapo")


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
