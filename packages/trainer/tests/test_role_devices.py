"""Roles, their losses and what travels between them, with the model on a device and the batch on the host."""

import pytest
import torch

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, train_batch
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import FakeCuda, make_tiny_model, pretend_on_cuda, random_batch
from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.algorithms.interface import StepShape
from offbeat_trainer.algorithms.ppo import ValueLoss
from offbeat_trainer.algorithms.roles import Critic, RewardModel, Role
from offbeat_trainer.config import GrpoConfig
from offbeat_trainer.data.metrics import reduce_metrics

HEADS = ("lm", "value")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {head: make_tiny_model(folder / head, head=head) for head in HEADS}


def engine_of(models, head="lm"):
    config = Fsdp2Config(
        model=ModelConfig(path=models[head], head=head),
        optimizer=OptimizerConfig(lr=1e-2),
        micro_batch_tokens=60,
    )
    engine = Fsdp2Engine(config, World())
    engine.init_model()
    return engine


def sampled_batch():
    batch = random_batch(6)
    shape, mask = batch["input_ids"].shape, batch["loss_mask"]
    more = {
        "advantages": torch.randn(shape) * mask,
        "rollout_logprobs": -torch.rand(shape) * mask,
        "policy_version": torch.zeros(shape, dtype=torch.int64),
        "group": torch.arange(6) // 2,
        "returns": torch.randn(shape) * mask,
        "values": torch.randn(shape) * mask,
    }
    return train_batch(**{**batch, **more})


@pytest.mark.parametrize("updates_per_step", [1, 3])
def test_a_policy_with_a_reference(models, updates_per_step):
    actor_engine, judge = engine_of(models), engine_of(models)
    algorithm = Grpo(
        config=GrpoConfig(kl_coef=0.1),
        step=StepShape(updates_per_step=updates_per_step, max_completion_tokens=24),
    )
    with FakeCuda():
        for engine in (actor_engine, judge):
            pretend_on_cuda(engine)
        roles = {"policy": Role(actor_engine), "reference": Role(judge)}
        metrics = reduce_metrics(algorithm.learn(roles, sampled_batch()))
    assert metrics["train/loss"] == 0.0  # the device has no values


def test_a_critic_and_a_reward_model(models):
    engine = engine_of(models, "value")
    with FakeCuda():
        pretend_on_cuda(engine)
        batch = sampled_batch()
        values = Critic(engine, ValueLoss()).values(batch)
        assert (values.shape, values.device.type) == (batch["input_ids"].shape, "cpu")
        assert "critic/loss" in reduce_metrics(Critic(engine, ValueLoss(), updates_per_step=2).update(batch))
        assert RewardModel(engine).scores(batch).shape == (6,)
