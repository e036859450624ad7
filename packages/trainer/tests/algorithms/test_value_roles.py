"""Critic and reward model on a real engine of one rank, beside the Hugging Face model run plainly."""

import pytest
import torch
from transformers import AutoModelForTokenClassification

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_trainer.algorithms.ppo import ValueLoss, gae
from offbeat_trainer.algorithms.roles import Critic, RewardModel
from offbeat_trainer.data.metrics import reduce_metrics

SEED = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def plain(model):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return AutoModelForTokenClassification.from_pretrained(
            model, num_labels=1, dtype=torch.float32
        ).eval()


def new_engine(model, **settings):
    config = Fsdp2Config(
        model=ModelConfig(path=model, head="value", seed=SEED),
        optimizer=OptimizerConfig(lr=1e-2),
        micro_batch_tokens=24,
        **settings,
    )
    engine = engine_class("fsdp2")(config, World())
    engine.init_model()
    return engine


def states(plain, ids):
    with torch.no_grad():
        return plain(ids[None]).logits[0, :, 0]


def test_values_are_those_of_the_state_before_each_token(model, plain):
    batch = random_batch(5)
    values = Critic(new_engine(model), ValueLoss()).values(batch)
    assert values.shape == batch["input_ids"].shape
    for b, length in enumerate(batch["lengths"].tolist()):
        expected = states(plain, batch["input_ids"][b, :length])
        for t in range(1, length):
            wanted = float(expected[t - 1]) if batch["loss_mask"][b, t] else 0.0
            assert float(values[b, t]) == pytest.approx(wanted, abs=1e-5), (b, t)


def test_a_reward_model_reads_the_last_token(model, plain):
    batch = random_batch(5)
    scores = RewardModel(new_engine(model)).scores(batch)
    for b, length in enumerate(batch["lengths"].tolist()):
        assert float(scores[b]) == pytest.approx(
            float(states(plain, batch["input_ids"][b, :length])[-1]), abs=1e-5
        )
    changed = batch["input_ids"].clone()
    last = int(batch["lengths"][0]) - 1
    changed[0, last] = (changed[0, last] + 1) % 7
    batch["input_ids"] = changed
    again = RewardModel(new_engine(model)).scores(batch)
    assert (again != scores).tolist() == [True, False, False, False, False]


def test_a_critic_learns_the_returns_it_is_given(model):
    batch = random_batch(6)
    critic = Critic(new_engine(model), ValueLoss(clip=0), updates_per_step=2)
    mask = batch["loss_mask"]
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(6), batch["lengths"] - 1] = torch.arange(6.0)
    explained = []
    for _ in range(25):
        batch["values"] = critic.values(batch)
        _, batch["returns"] = gae(rewards, batch["values"], mask, discount=1, trace=1)
        explained.append(reduce_metrics(critic.update(batch)))
    assert explained[0]["value/explained_variance"] < 0.3
    assert explained[-1]["value/explained_variance"] > 0.8
    assert explained[-1]["critic/loss"] < 0.2 * explained[0]["critic/loss"]
    assert {"critic/grad_norm", "critic/lr", "value/mean", "value/clip_fraction"} <= explained[-1].keys()
    assert not any(key.startswith("train/") for key in explained[-1])
