"""Which completions rejection sampling keeps, and that it learns those alone."""

import pytest
import torch

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model
from offbeat_rollout import Completion, Finish
from offbeat_trainer import Group, Prompt, Role, Score, Trajectory, reduce_metrics
from offbeat_trainer.algorithms.rejection import Rejection
from offbeat_trainer.algorithms.trial import trial
from offbeat_trainer.config import RejectionConfig
from offbeat_trainer.data.assemble import assemble


def group(*rewards, uid="p"):
    made = [
        Completion.of(
            request_id=f"{uid}/{index}", token_ids=[5 + index, 9, 4], logprobs=[-1.0] * 3, policy_versions=[1] * 3,
            finish=Finish.STOP,
        )
        for index in range(len(rewards))
    ]  # fmt: skip
    return Group(
        prompt=Prompt(uid=uid, text="", token_ids=(1, 2)),
        trajectories=tuple(map(Trajectory.of, made)),
        scores=tuple(Score(reward=reward) for reward in rewards),
    )


@pytest.mark.parametrize(
    ("settings", "rewards", "kept"),
    [
        ({}, (0.1, 0.9, 0.5), [0, 1, 0]),
        ({}, (0.5, 0.5, 0.1), [1, 0, 0]),  # equal ones by order
        ({"best_of_group": 2}, (0.1, 0.9, 0.5), [0, 1, 1]),
        ({"best_of_group": 9}, (0.1, 0.9), [1, 1]),
        ({"best_of_group": 0, "min_reward": 0.5}, (0.1, 0.9, 0.5), [0, 1, 1]),
        ({"min_reward": 0.0}, (-1.0, 0.0), [0, 1]),
        ({"best_of_group": 2, "min_reward": 0.6}, (0.1, 0.9, 0.5), [0, 1, 0]),
    ],
)
def test_the_best_are_kept_as_far_as_they_are_good_enough(settings, rewards, kept):
    algorithm = Rejection(config=RejectionConfig(**settings))
    assert algorithm.keeps(group(*rewards)) == ""
    targets = algorithm.targets([group(*rewards), group(*rewards)])
    assert targets["loss_mask"].int().tolist() == kept * 2
    batch = assemble([group(*rewards)], algorithm.targets([group(*rewards)]), temperature=1.0)
    assert batch["loss_mask"].any(1).int().tolist() == kept


def test_a_group_without_one_that_is_good_enough_is_left_out():
    assert Rejection(config=RejectionConfig(min_reward=1.0)).keeps(group(0.0, 0.5)) == "rejected"


def test_a_trial_finds_that_it_does_not_read_the_samplers_log_probs():
    assert trial(Rejection(config=RejectionConfig())) is False


def test_what_is_kept_becomes_likelier_and_the_loss_is_its_mean_over_tokens(tmp_path):
    algorithm = Rejection(config=RejectionConfig())
    told = Fsdp2Config(model=ModelConfig(path=make_tiny_model(tmp_path)), optimizer=OptimizerConfig(lr=1e-2))
    engine = engine_class("fsdp2")(told, World())
    engine.init_model()
    role, groups = Role(engine), [group(0, 1, 0), group(1, 0, 0, uid="q")]
    batch = assemble(groups, algorithm.targets(groups), temperature=1.0)
    logprobs_BT = role.whole_logprobs(batch)
    said = [reduce_metrics(algorithm.learn({"policy": role}, batch.clone())) for _ in range(10)]
    mean = float(logprobs_BT[batch["loss_mask"]].double().mean())
    assert said[0]["train/loss"] == pytest.approx(-mean, abs=1e-5)
    assert said[-1]["train/loss"] < 1.0 < said[0]["train/loss"]
    everything = assemble(groups, {"advantages": torch.zeros(6)}, temperature=1.0)
    after_B = role.whole_logprobs(everything).sum(1)
    assert after_B[[0, 1]].min() > after_B[2] + 1, (
        "5, 9, 4 and 6, 9, 4 are kept of their groups, 7, 9, 4 never"
    )
