"""Installed algorithms are composed, tried and planned by their names; what an engine cannot is refused before a run."""

import json

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.planning.algorithm import algorithm_of, algorithm_refusals
from offbeat_recipes.testing import Command
from offbeat_trainer import algorithm_names

ONLINE = [name for name in algorithm_names() if name not in ("distill", "dpo")]
REWARD_KL = ["algorithm.kl_in=reward", "algorithm.kl_coef=0.01", "algorithm.kl_target=0.02", "algorithm.entropy_target=0.5"]  # fmt: skip
MOVED = ["algorithm.kl_coef=0.01", "algorithm.reference_every=5", "algorithm.reference_keep=0.5"]
RUN_TIMEOUT_S = 1200.0


@pytest.mark.parametrize("name", ONLINE)
def test_each_passes_the_trial_in_every_mode(name):
    for mode in ("sync", "fully_async"):
        config = compose_run([f"algorithm={name}", f"mode={mode}", "trainer.updates_per_step=2"])
        assert algorithm_of(config).check() == []
        # What is taught its own best samples does not ask who sampled them.
        assert algorithm_refusals(config) == ([], name != "rejection")


@pytest.mark.parametrize("settings", [REWARD_KL, MOVED])
def test_coefficients_and_references_that_move_pass_the_trial(settings):
    config = compose_run(settings)
    assert algorithm_of(config).check() == []
    assert algorithm_refusals(config) == ([], True)


def test_an_engine_that_takes_no_weights_over_has_no_reference_that_moves():
    config = compose_run(["engine=megatron", "algorithm.kl_coef=0.01", "algorithm.reference_every=5"])
    [refusal] = [one for one in algorithm_refusals(config)[0] if one.setting == "algorithm.reference_every"]
    assert refusal.reason == "engine=megatron does not take another engine's weights over"


@pytest.mark.ray
@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "settings"),
    [("dapo", []), ("reinforce_pp", []), ("remax", []), ("gpg", []), ("grpo", REWARD_KL), ("grpo", MOVED)],
)
def test_each_learns_to_add(name, settings, tmp_path, shared_ray):
    folder = tmp_path / "run"
    words = ["task=arithmetic", f"algorithm={name}", *settings, "rollout=hf", shared_ray, "trainer.steps=40", f"run_dir={folder}"]  # fmt: skip
    Command("train", words, tmp_path / "said" / "train").succeed(RUN_TIMEOUT_S)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1
    assert bool(summary["left_out_groups"]) is (name == "dapo")
