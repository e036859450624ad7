"""Algorithms by name and by path; one that lacks something is told what."""

import inspect
import re

import pytest

from offbeat_trainer.algorithms.distill import Distill, DistillConfig
from offbeat_trainer.algorithms.grpo import DrGrpo, Grpo, Rloo
from offbeat_trainer.algorithms.interface import StepShape
from offbeat_trainer.algorithms.ppo import Ppo
from offbeat_trainer.algorithms.registry import algorithm_class, algorithm_config_class, algorithm_names
from offbeat_trainer.algorithms.trial import trial
from offbeat_trainer.config import (
    Advantage,
    Aggregation,
    DrGrpoConfig,
    GrpoConfig,
    PpoConfig,
    RlooConfig,
)
from offbeat_trainer.errors import LoadError, TrainerError

HEAD = "import torch\nfrom offbeat_trainer import Algorithm, AlgorithmConfig, RoleSpec\n"
ROLES = "    def roles(self): return {'policy': RoleSpec(trained=True)}\n"
TARGETS = (
    "    def targets(self, groups): return {'advantages': torch.zeros(sum(len(g.scores) for g in groups))}\n"
)
LEARN = "    def learn(self, roles, batch): return []\n"


@pytest.mark.parametrize(
    ("name", "cls", "config", "advantage", "aggregation"),
    [
        ("grpo", Grpo, GrpoConfig, Advantage.GRPO, Aggregation.TOKEN_MEAN),
        ("dr_grpo", DrGrpo, DrGrpoConfig, Advantage.DR_GRPO, Aggregation.SEQ_MEAN_TOKEN_SUM_NORM),
        ("rloo", Rloo, RlooConfig, Advantage.RLOO, Aggregation.SEQ_MEAN_TOKEN_SUM),
    ],
)
def test_ours_are_found_by_name(name, cls, config, advantage, aggregation):
    assert name in algorithm_names()
    assert (algorithm_class(name), algorithm_config_class(name)) == (cls, config)
    assert (config().advantage, config().aggregation) == (advantage, aggregation)
    trial(cls(config=config()))


@pytest.mark.parametrize("name", algorithm_names())
def test_each_says_what_it_is_how_it_is_computed_and_when_to_use_it(name):
    """The page of algorithms is made of these three paragraphs."""
    cls = algorithm_class(name)
    what, formula, use = inspect.cleandoc(cls.__doc__).split("\n\n")
    assert re.match(r"\S.* \([^)]*arXiv \d{4}\.\d{5}[^)]*\): ", what), what
    assert " = " in formula
    assert use.startswith("Use it when ")
    assert " not " in use.replace("\n", " ")


def test_one_of_a_file_is_found_by_its_path(tmp_path):
    (tmp_path / "own.py").write_text(f"{HEAD}class Own(Algorithm):\n{ROLES}{TARGETS}{LEARN}")
    cls = algorithm_class(f"{tmp_path}/own.py:Own")
    assert algorithm_config_class(f"{tmp_path}/own.py:Own") is cls.Config
    trial(cls(config=cls.Config(), step=StepShape(group_size=3)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "own.py has no 'Own'"),
        ("Own = 5", "own.py:Own is no class of `offbeat_trainer.Algorithm`: 5"),
        ("class Own: pass", "is no class of `offbeat_trainer.Algorithm`"),
        (f"class Own(Algorithm):\n{ROLES}", "own.py:Own lacks `learn`, `targets`"),
        (
            f"class Own(Algorithm):\n    Config = dict\n{ROLES}{TARGETS}{LEARN}",
            "its `Config` must be a subclass of",
        ),
    ],
)
def test_what_an_algorithm_lacks_is_said(text, words, tmp_path):
    (tmp_path / "own.py").write_text(HEAD + text)
    with pytest.raises(LoadError, match=words):
        algorithm_class(f"{tmp_path}/own.py:Own")


def test_one_that_nobody_has_is_refused_with_those_that_are_there():
    names = algorithm_names()
    assert {"distill", "dpo", "grpo", "kto", "ppo"} <= set(names)
    with pytest.raises(LoadError, match=f"no algorithm named 'unheard'; installed: {', '.join(names)}"):
        algorithm_class("unheard")


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ("{'advantage': torch.zeros(6)}", "unknown target `advantage`"),
        ("{'advantages': torch.zeros(5)}", r"must be \[6\] or \[6, 3\], got \[5\]"),
        ("{'advantages': torch.zeros(6) / 0}", "completion 0 of the batch is no finite number"),
    ],
)
def test_a_trial_finds_targets_that_no_batch_can_hold(targets, words, tmp_path):
    (tmp_path / "own.py").write_text(
        f"{HEAD}class Own(Algorithm):\n{ROLES}    def targets(self, groups): return {targets}\n{LEARN}"
    )
    cls = algorithm_class(f"{tmp_path}/own.py:Own")
    with pytest.raises(TrainerError, match=words):
        trial(cls(config=cls.Config(), step=StepShape(group_size=3)))


@pytest.mark.parametrize(
    ("kept", "words"), [("None", "got None"), ("True", "got True"), ("1 / 0", "division")]
)
def test_a_trial_finds_what_is_no_reason_to_leave_a_group_out(kept, words, tmp_path):
    (tmp_path / "own.py").write_text(
        f"{HEAD}class Own(Algorithm):\n{ROLES}    def targets(self, groups): return {{}}\n{LEARN}"
        f"    def keeps(self, group): return {kept}\n"
    )
    cls = algorithm_class(f"{tmp_path}/own.py:Own")
    with pytest.raises((TrainerError, ZeroDivisionError), match=words):
        trial(cls(config=cls.Config(), step=StepShape(group_size=3)))


LOSS = """
def loss(predictions, batch, scale):
    logprobs_BT = torch.where(batch["loss_mask"], predictions["logprobs"], 0.0)
    return LossOutput(loss={value})
class Own(GroupPolicyGradient):
    def advantages(self, rewards_NG): return rewards_NG
    def loss_fn(self): return loss
"""


def try_loss(value, tmp_path, updates=2):
    (tmp_path / "own.py").write_text(
        "import torch\nfrom offbeat_engine import LossOutput\nfrom offbeat_trainer import GroupPolicyGradient\n"
        + LOSS.format(value=value)
    )
    cls = algorithm_class(f"{tmp_path}/own.py:Own")
    return trial(cls(config=cls.Config(), step=StepShape(group_size=3, updates_per_step=updates)))


GAIN = "-(logprobs_BT * batch['advantages']).sum() / scale.num_tokens"


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("(logprobs_BT * batch['gains']).sum()", KeyError, "gains"),
        ("-(logprobs_BT * batch['advantages']).mean()", TrainerError, "of its two parts: how a batch is cut"),
        ("batch['advantages'].sum()", TrainerError, "has no gradient"),
        ("-logprobs_BT * batch['advantages']", TrainerError, "whose `loss` is a scalar"),
    ],
)
def test_a_trial_calls_the_loss_whole_and_in_parts(value, error, words, tmp_path):
    with pytest.raises(error, match=words):
        try_loss(value, tmp_path)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_trial_says_whether_the_sampler_is_looked_at(updates, tmp_path):
    assert not try_loss(GAIN, tmp_path, updates)
    weighed = "-((logprobs_BT.detach() - batch['rollout_logprobs']).exp() * logprobs_BT * batch['advantages']).sum() / scale.num_tokens"
    (tmp_path / "other").mkdir()
    assert try_loss(weighed, tmp_path / "other", updates)
    assert trial(
        Grpo(config=GrpoConfig(kl_coef=0.1, entropy_coef=0.1), step=StepShape(updates_per_step=updates))
    )
    assert not trial(Grpo(config=GrpoConfig(correction="none"), step=StepShape(updates_per_step=updates)))
    assert trial(Ppo(config=PpoConfig(critic_warmup_steps=5), step=StepShape(updates_per_step=updates)))
    assert trial(Distill(config=DistillConfig(), step=StepShape(updates_per_step=updates)))
