"""Algorithms of one's own: found by path, set as any other, tried before anything starts, and learned by."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_recipes.cli._hydra import compose_run, to_yaml
from offbeat_recipes.errors import SettingError
from offbeat_recipes.planning.algorithm import algorithm_of, algorithm_refusals
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.planning.plan import plan_run
from offbeat_recipes.testing import Command
from offbeat_trainer import (
    DrGrpo,
    Grpo,
    GrpoConfig,
    PolicyLossConfig,
    PpoConfig,
    Rloo,
    Role,
    algorithm_config_class,
    algorithm_names,
)

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
OWN = f"algorithm={Path(__file__).with_name('own_algorithm.py')}:Own"
RUN_TIMEOUT_S = 600.0
WITH_KL = [name for name in algorithm_names() if issubclass(algorithm_config_class(name), PolicyLossConfig)]
BROKEN = """
from offbeat_trainer import Algorithm, GroupPolicyGradient, RoleSpec, AlgorithmConfig
class NoLearning(Algorithm):
    def roles(self): return {"policy": RoleSpec(trained=True)}
    def targets(self, groups): return {}
class NoPolicy(GroupPolicyGradient):
    def roles(self): return {"actor": RoleSpec(trained=True)}
    def advantages(self, rewards_NG): return rewards_NG
    def loss_fn(self): return None
class WrongShape(NoPolicy):
    def roles(self): return {"policy": RoleSpec(trained=True)}
    def targets(self, groups): return {"advantages": self.advantages(None)}
def loss(predictions, batch, scale): return batch["gains"] * 0
class NoKey(NoPolicy):
    def roles(self): return {"policy": RoleSpec(trained=True)}
    def loss_fn(self): return loss
"""


@pytest.mark.parametrize(
    ("settings", "cls", "config"),
    [
        ([], Grpo, GrpoConfig()),
        (["algorithm=dr_grpo"], DrGrpo, DrGrpo.Config()),
        (["algorithm.name=rloo", "algorithm.kl_coef=0.1"], Rloo, Rloo.Config(kl_coef=0.1)),
        (["algorithm.advantage=rloo"], Grpo, GrpoConfig(advantage="rloo")),
    ],
)
def test_the_family_is_chosen_by_name_and_its_settings_are_what_they_were(settings, cls, config):
    made = algorithm_of(compose_run(settings))
    assert (type(made), made.config) == (cls, config)


def test_one_of_a_file_is_set_checked_and_printed_as_any_other(tmp_path):
    config = compose_run([OWN, "algorithm.clip_low=1e-3", "trainer.updates_per_step=2"])
    made = algorithm_of(config)
    assert (made.config.clip_low, made.config.clip_high, made.step.updates_per_step) == (1e-3, 4e-4, 2)
    assert algorithm_refusals(config)[0] == []
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert set(yaml.safe_load(path.read_text())["algorithm"]) == {"name", "clip_low", "clip_high"}
    assert compose_run([], str(path)) == config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([OWN, "algorithm.clip_lo=1e-3"], "did you mean `algorithm.clip_low`?"),
        ([OWN, "algorithm.clip_low=2.0"], "`algorithm.clip_low`: expected at most 1, got 2.0"),
        (
            [OWN, "algorithm.kl_coef=0.1"],
            f"`algorithm.kl_coef` belongs to algorithm={' or '.join(WITH_KL)}; this run has",
        ),
        (
            ["algorithm=rlloo"],
            f"expected one of {', '.join(algorithm_names())}, got 'rlloo'; did you mean 'rloo'?",
        ),
        (["algorithm=nowhere.py:Own"], "`algorithm.name`: cannot import 'nowhere.py': FileNotFoundError"),
    ],
)
def test_what_is_wrong_is_said(settings, words):
    with pytest.raises(SettingError) as caught:
        compose_run(settings)
    assert words in str(caught.value)


def test_another_algorithm_over_written_settings_brings_its_own_defaults(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(compose_run(["algorithm=dr_grpo", "algorithm.clip_high=0.5"])))
    rloo = algorithm_of(compose_run(["algorithm=rloo"], str(path))).config
    assert (rloo.advantage, rloo.aggregation, rloo.clip_high) == ("rloo", "seq_mean_token_sum", 0.5)
    own = algorithm_of(compose_run([OWN], str(path))).config
    assert (own.clip_low, own.clip_high) == (3e-4, 4e-4)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoLearning", "`algorithm.name`: {path}:NoLearning lacks `learn`"),
        ("NoPolicy", "failed a trial: PlanRefused: an algorithm needs a role 'policy'"),
        ("WrongShape", "failed a trial: AttributeError: 'NoneType' object has no attribute 'ndim'"),
        ("NoKey", '\'key "gains" not found in TensorDict'),
        ("NoKey", "(at {path}:13)"),
    ],
)
def test_a_broken_algorithm_is_told_what_is_missing_before_anything_starts(name, words, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    folder = tmp_path / "run"
    command = Command(
        "train", [f"algorithm={tmp_path}/broken.py:{name}", f"run_dir={folder}"], tmp_path / "said" / "train"
    )
    assert command.wait(RUN_TIMEOUT_S) == 2, command.said
    said = " ".join((command.said + command.complained).split())
    assert words.format(path=tmp_path / "broken.py") in said
    assert not folder.exists()


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ([OWN], False),
        ([OWN, "mode=fully_async"], True),
        ([OWN, "mode=one_step_off"], True),
        (["mode=fully_async"], False),
        (["mode=fully_async", "algorithm.correction=none"], True),
    ],
)
def test_stale_tokens_that_a_loss_takes_for_fresh_are_noted(settings, noted):
    config = compose_run(settings)
    plan = plan_run(config, gather_facts(config))
    assert plan.refusals == ()
    assert any("does not depend on `rollout_logprobs`" in warning for warning in plan.warnings) is noted


@pytest.fixture
def reinforce(tmp_path):
    """The first example of the page, as a setting."""
    example, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "reinforce.py").write_text(example)
    return f"algorithm={tmp_path}/reinforce.py:Reinforce"


def test_the_example_of_the_page_makes_good_completions_likelier(reinforce, tmp_path):
    config = compose_run([reinforce, "algorithm.baseline=0.25"])
    assert algorithm_refusals(config)[0] == []
    algorithm = algorithm_of(config)
    settings = Fsdp2Config(
        model=ModelConfig(path=make_tiny_model(tmp_path / "tiny")), optimizer=OptimizerConfig(lr=1e-2)
    )
    engine = engine_class("fsdp2")(settings, World())
    engine.init_model()
    policy = Role(engine)
    batch = random_batch(6)
    better_B = torch.arange(6) % 2 == 0
    rewards_B = better_B.float() - algorithm.config.baseline
    batch["advantages"] = torch.where(batch["loss_mask"], rewards_B[:, None], 0.0)
    [share] = policy.shares(batch)
    before_BT = policy.logprobs(share)
    for _ in range(4):
        algorithm.learn({"policy": policy}, batch)
    change_B = (policy.logprobs(share) - before_BT).sum(1)
    good_B = share["advantages"].sum(1) > 0
    assert good_B.sum() == 3
    assert change_B[good_B].min() > 0 > change_B[~good_B].max()
    engine.close()


def test_the_surrogate_of_the_page_is_short_and_pulls_the_ratio_back_beyond_its_bound(tmp_path):
    _, example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(example.splitlines()) <= 15
    (tmp_path / "spo.py").write_text(example)
    config = compose_run([f"algorithm={tmp_path}/spo.py:Spo", "algorithm.clip_high=0.5"])
    assert algorithm_refusals(config) == ([], True)
    ratio_N = torch.tensor([0.5, 1.0, 1.5, 2.0], requires_grad=True)
    found = algorithm_of(config).surrogate(ratio_N, torch.full((4,), 2.0), None)
    (slope_N,) = torch.autograd.grad(found.loss.sum(), ratio_N)
    assert slope_N.tolist() == [-4.0, -2.0, 0.0, 2.0]


def test_the_page_names_all_settings_that_it_speaks_of():
    page = PAGE.read_text()
    speaks_of = {*re.findall(r"`(\w+)`", page)}
    own = {item.name for item in fields(PpoConfig)} - {item.name for item in fields(PolicyLossConfig)}
    assert own <= speaks_of
    kin = {item.name for item in fields(GrpoConfig)}
    assert (
        kin - {"advantage", "proximal"} - {name for name in kin if name.startswith("correction")} <= speaks_of
    )


def learn(folder: Path, *settings: str) -> list[dict[str, float]]:
    """Train as a user types it; return the metrics of all steps."""
    words = ["task=arithmetic", f"run_dir={folder}", *settings]
    Command("train", words, folder.with_name("said") / "train").succeed(RUN_TIMEOUT_S)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ray
@pytest.mark.slow
def test_one_of_a_file_runs_on_two_ranks(tmp_path, shared_ray):
    steps = learn(
        tmp_path / "run", OWN, shared_ray, "rollout=hf", "engine.num_ranks=2", "warmup.steps=4", "trainer.steps=2",
        "trainer.prompts_per_step=4", "trainer.group_size=4", "trainer.updates_per_step=2",
        "trainer.validation_prompts=8",
    )  # fmt: skip
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["own/ratio_max"] > 0 and line["train/grad_norm"] >= 0 for line in steps)


@pytest.mark.ray
@pytest.mark.slow
def test_ppo_saves_and_resumes_policy_and_critic_on_two_ranks(tmp_path, shared_ray):
    folder = tmp_path / "run"
    words = [
        "task=arithmetic", "algorithm=ppo", "algorithm.critic_warmup_steps=1", f"run_dir={folder}", shared_ray, "rollout=hf",
        "engine.num_ranks=2", "warmup.steps=4", "trainer.prompts_per_step=4", "trainer.group_size=4",
        "trainer.validation_prompts=8",
    ]  # fmt: skip
    for end, resume in ((2, []), (3, ["resume=auto"])):
        said = tmp_path / "said" / f"to_{end}"
        Command("train", [*words, f"trainer.steps={end}", *resume], said).succeed(RUN_TIMEOUT_S)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert ["train/loss" in line for line in steps] == [False, True, True]
    assert all(line["critic/grad_norm"] > 0 for line in steps)
    assert all((folder / "checkpoints" / role / "step_3").is_dir() for role in ("policy", "critic"))


def begins_at(checkpoint: Path) -> set[str]:
    """Return where rank 1's piece of down-projections begins: at a column with Megatron's tensors, at a row with FSDP2's shards."""
    keys: list[str] = []
    for file in checkpoint.glob("rank_1_*.safetensors"):
        with safe_open(file, "pt") as opened:
            keys += opened.keys()
    return {key.rpartition("@")[2] for key in keys if "down_proj.weight" in key}


@pytest.mark.ray
@pytest.mark.deep
def test_ppo_learns_with_a_policy_of_megatron_and_a_critic_of_fsdp2_which_then_moves(tmp_path, shared_ray):
    """On the same two ranks, the policy's two halves of each layer and the critic's two shards."""
    folder = tmp_path / "run"
    words = [
        "task=arithmetic", "engine=megatron", "engine.num_ranks=2", "engine.tensor_parallel_size=2", "algorithm=ppo",
        "algorithm.critic_lr=1e-3", f"run_dir={folder}", shared_ray, "rollout=hf", "trainer.save_every=12",
    ]  # fmt: skip
    legs = (("fsdp2", "trainer.steps=12"), ("megatron", "trainer.steps=24", "resume=auto"))
    for engine, *more in legs:
        said = tmp_path / "said" / engine
        Command("train", [*words, f"algorithm.critic_engine={engine}", *more], said).succeed(RUN_TIMEOUT_S)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, 25))
    assert all(line["critic/grad_norm"] > 0 for line in steps)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_after"] > 0.9 > summary["accuracy_before"]
    column, row = {"0,128"}, {"64,0"}
    made = {
        (role, step): begins_at(folder / "checkpoints" / role / f"step_{step}")
        for role in ("policy", "critic")
        for step in (12, 24)
    }
    assert made == {
        ("policy", 12): column,
        ("policy", 24): column,
        ("critic", 12): row,
        ("critic", 24): column,
    }


WIDE = """
from dataclasses import dataclass
from offbeat_trainer.algorithms.policy.batch_level import ClipCov
from offbeat_trainer.algorithms.policy.configs import ClipCovConfig
@dataclass(frozen=True, slots=True, kw_only=True)
class WideConfig(ClipCovConfig):
    covariance_low: float = 0.1
class Wide(ClipCov):
    Config = WideConfig
"""


@pytest.mark.ray
@pytest.mark.deep
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_two_ranks_and_other_micro_batches_choose_the_same_tokens(name, tmp_path, shared_ray):
    (tmp_path / "wide.py").write_text(WIDE)
    algorithm = f"{tmp_path}/wide.py:Wide" if name == "clip_cov" else name
    words = [
        shared_ray, "rollout=hf", "trainer.steps=1", "trainer.validation_prompts=0", f"algorithm={algorithm}", "trainer.updates_per_step=2",
        "algorithm.fraction=0.05",
    ]  # fmt: skip
    learn(tmp_path / "warm", "warmup.steps=60", *words)
    words += [f"model.path={tmp_path}/warm/final", "warmup.steps=0"]
    [one] = learn(tmp_path / "one", "engine.micro_batch_tokens=300", *words)
    [two] = learn(tmp_path / "two", "engine.micro_batch_tokens=600", "engine.num_ranks=2", *words)
    assert one["train/micro_batches"] > 2 * two["train/micro_batches"]
    assert one["policy/masked_fraction"] > 0
    for key in ("policy/masked_fraction", "train/loss", "train/grad_norm"):
        assert two[key] == pytest.approx(one[key], rel=1e-4), key


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.deep
def test_gspo_learns_to_add(tmp_path):
    """From what the warm-up leaves to more, in a few dozen steps; a mini-batch after the first meets a policy that moved."""
    steps = learn(tmp_path / "run", "algorithm=gspo", "trainer.steps=40", "trainer.updates_per_step=4")
    rewards = [line["reward/mean"] for line in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert max(line["policy/clip_high_fraction"] for line in steps) > 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"]


@pytest.mark.ray
@pytest.mark.deep
def test_a_student_learns_from_a_teacher_that_has_learned(tmp_path, shared_ray):
    """The teacher is what GRPO made of the student's own beginning; no reward is used, and a third of the sums becomes nearly all."""
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    words = ["task=arithmetic", "rollout=hf", shared_ray]
    Command("train", [*words, f"run_dir={teacher}"], tmp_path / "said" / "teacher").succeed(RUN_TIMEOUT_S)
    taught = ["algorithm=distill", f"algorithm.teacher_path={teacher}/final", "trainer.steps=25"]
    Command("train", [*words, f"run_dir={student}", *taught], tmp_path / "said" / "student").succeed(
        RUN_TIMEOUT_S
    )
    steps = [json.loads(line) for line in (student / "metrics.jsonl").read_text().splitlines()]
    far = [line["distill/reverse_kl_nats"] for line in steps]
    assert sum(far[-5:]) < 0.5 * sum(far[:5])
    summary = json.loads((student / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (["engine=megatron"], "naming the likeliest tokens of a distribution is not written"),
        (["engine.num_ranks=2", "engine.sequence_parallel_size=2"], "ranks that share a sequence"),
        ([], ""),
    ],
)
def test_the_plan_knows_which_engine_hands_out_whole_distributions(engine, words, tmp_path):
    teacher = make_tiny_model(tmp_path)
    settings = ["algorithm=distill", f"algorithm.teacher_path={teacher}", "algorithm.divergence=jsd"]
    refused, _ = algorithm_refusals(compose_run(["task=arithmetic", *settings, *engine]))
    found = [item.reason for item in refused if item.setting == "engine"]
    assert [words in reason for reason in found] == [True] * bool(words), refused
