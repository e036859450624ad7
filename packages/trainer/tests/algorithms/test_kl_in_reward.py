"""KL in the reward, coefficients that follow a target, and a reference that moves, on real engines."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from made_groups import made_group
from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model
from offbeat_rollout import Completion, Finish
from offbeat_trainer import (
    Advantage,
    DapoConfig,
    Grpo,
    GrpoConfig,
    KlIn,
    Proximal,
    Role,
    StepShape,
    algorithm_class,
    reduce_metrics,
)
from offbeat_trainer.algorithms import grpo
from offbeat_trainer.algorithms.grpo import REFERENCE
from offbeat_trainer.algorithms.roles import POLICY
from offbeat_trainer.data.assemble import assemble
from offbeat_trainer.data.types import Trajectory, Turn

COEF = 0.3


class Watching(Role):
    """Keeps what it was trained on."""

    def shares(self, batch, num_updates=1):
        self.batch = batch.clone()
        return super().shares(batch, num_updates)

    def train(self, shares, loss_fn):
        self.loss_fn = loss_fn
        return super().train(shares, loss_fn)


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    """A policy, and a reference whose weights are others."""
    torch.set_num_threads(1)
    made = {}
    for seed, name in enumerate((POLICY, REFERENCE)):
        path = str(make_tiny_model(tmp_path_factory.mktemp(name) / "tiny", seed=seed))
        engine = engine_class("fsdp2")(
            Fsdp2Config(model=ModelConfig(path=path), optimizer=OptimizerConfig(lr=1e-3)), World()
        )
        engine.init_model()
        made[name] = Watching(engine)
    yield made
    for role in made.values():
        role.engine.close()


def said(*ids, versions=1):
    return Completion.of(
        request_id="r", token_ids=ids, logprobs=[-2.0 - 0.1 * i for i in range(len(ids))], policy_versions=[versions] * len(ids),
        finish=Finish.STOP,
    )  # fmt: skip


def groups():
    """Two groups; one completion has two rows, since its history was cut, and one has no token."""
    first = made_group("p", (1.0, 0.0, 0.5), lengths=(3, 0, 2))
    second = made_group("q", (0.0, 2.0), lengths=(1, 4))
    edited = Trajectory(
        turns=(
            Turn(completion=said(4, 5)),
            Turn(completion=said(6, 7, 8), context=np.array([1, 3], np.int32)),
        ),
        finish=Finish.STOP,
    )
    return [first, replace(second, trajectories=(edited, second.trajectories[1]))]


INDEX_OF_ROW = [0, 1, 2, 3, 3, 4]


def batch_of(algorithm):
    found = groups()
    return assemble(found, algorithm.targets(found), temperature=1.0)


def plain(batch, old_BT, ref_BT, rewards):
    """Reward less the coefficient times the sum of log pi_old - log pi_ref over what the policy sampled, then GRPO."""
    costs = [0.0] * len(rewards)
    for row, index in enumerate(INDEX_OF_ROW):
        for t in range(batch["loss_mask"].shape[1]):
            if batch["loss_mask"][row, t]:
                costs[index] += float(old_BT[row, t]) - float(ref_BT[row, t])
    left = [reward - COEF * cost for reward, cost in zip(rewards, costs, strict=True)]
    advantages = []
    for part in (left[:3], left[3:]):
        mean = sum(part) / len(part)
        sigma = math.sqrt(sum((reward - mean) ** 2 for reward in part) / (len(part) - 1))
        advantages += [(reward - mean) / (sigma + 1e-6) for reward in part]
    return torch.tensor([[advantages[index]] for index in INDEX_OF_ROW]) * batch["loss_mask"]


def check(roles, **settings):
    algorithm = Grpo(
        config=GrpoConfig(kl_in=KlIn.REWARD, kl_coef=COEF, **settings), step=StepShape(updates_per_step=2)
    )
    batch = batch_of(algorithm)
    by_sampler = settings.get("proximal") is Proximal.ROLLOUT
    before = batch["rollout_logprobs"] if by_sampler else roles[POLICY].whole_logprobs(batch)
    wanted = plain(batch, before, roles[REFERENCE].whole_logprobs(batch), [1.0, 0.0, 0.5, 0.0, 2.0])
    metrics = reduce_metrics(algorithm.learn(roles, batch))
    trained = roles[POLICY].batch
    torch.testing.assert_close(trained["advantages"], wanted, rtol=1e-4, atol=1e-4)
    assert ("old_logprobs" in trained) is not by_sampler
    assert not [key for key in map(str, trained.keys()) if key.startswith("sample/")]
    assert roles[POLICY].loss_fn.config.kl_coef == 0
    return metrics


@pytest.mark.parametrize("proximal", Proximal)
def test_the_reward_is_less_the_kl_of_the_completion_before_it_is_compared(roles, proximal):
    metrics = check(roles, proximal=proximal)
    assert metrics["policy/ref_kl_nats"] > 0  # watched, though it is no term of the loss
    assert "policy/kl_coef" not in metrics


MISTAKES = {
    "sign": ("_coef", lambda real: lambda self, name: -real(self, name)),
    "normaliser": ("_coef", lambda real: lambda self, name: real(self, name) * 2),
    "shift": ("estimate", lambda real: lambda self, samples: real(self, samples) + 0.01),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_caught(roles, name, monkeypatch):
    method, wrong = MISTAKES[name]
    check(roles)
    monkeypatch.setattr(Grpo, method, wrong(getattr(Grpo, method)))
    with pytest.raises(AssertionError, match="not close"):
        check(roles)


def test_a_mean_over_tokens_in_place_of_their_sum_is_caught(roles, monkeypatch):
    real = grpo.inside
    monkeypatch.setattr(grpo, "inside", lambda values, mask: real(values, mask) / mask.sum(-1, keepdim=True).clamp(min=1))  # fmt: skip
    with pytest.raises(AssertionError, match="not close"):
        check(roles)


def test_a_completion_that_is_not_trained_counts_among_the_others_rewards(roles):
    """DAPO's filter takes its tokens out of the loss, and so out of the KL, not its reward out of the mean."""
    dapo = algorithm_class("dapo")(config=DapoConfig(kl_in=KlIn.REWARD, kl_coef=COEF, overlong_buffer=0.0))
    found = [made_group("p", (1.0, 0.0), finishes=(Finish.STOP, Finish.LENGTH))]
    dapo.learn(roles, assemble(found, dapo.targets(found), temperature=1.0))
    share = roles[POLICY].batch
    assert share["advantages"][0].abs().max() > 0
    assert share["advantages"][1].abs().max() == 0


def test_the_kl_coefficient_rises_above_its_target_and_falls_below():
    algorithm = Grpo(config=GrpoConfig(kl_coef=0.5, kl_target=0.1))
    high, low, near = (
        algorithm.after({"policy/ref_kl_nats": kl}).state["kl_coef"] for kl in (1.0, 0.0, 0.11)
    )
    assert (high, low, near) == pytest.approx((0.51, 0.49, 0.505))
    later = algorithm.after({"policy/ref_kl_nats": 1.0}).after({"policy/ref_kl_nats": 1.0})
    assert later.loss_fn().config.kl_coef == pytest.approx(0.5 * 1.02**2)
    assert algorithm.after({}) == algorithm
    assert Grpo(config=GrpoConfig(kl_coef=0.5)).after({"policy/ref_kl_nats": 1.0}).state == {}


def test_the_coefficient_that_follows_is_the_one_in_the_reward(roles):
    algorithm = Grpo(config=GrpoConfig(kl_in=KlIn.REWARD, kl_coef=COEF, kl_target=1e-3))
    later = algorithm.at({"kl_coef": 0.0})
    metrics = reduce_metrics(later.learn(roles, batch_of(later)))
    assert metrics["policy/kl_coef"] == 0
    share = roles[POLICY].batch
    wanted = Grpo(config=GrpoConfig()).targets(groups())["advantages"][torch.tensor(INDEX_OF_ROW)]
    torch.testing.assert_close(share["advantages"], wanted[:, None].float() * share["loss_mask"])


def test_the_entropy_coefficient_counts_at_most_at_its_target_and_moves_by_0_005():
    algorithm = Grpo(config=GrpoConfig(entropy_coef=0.004, entropy_target=0.2))
    applied, states = [], []
    for entropy in (0.1, 0.2, 0.5, 0.5, 0.5, 0.5, 0.1):
        algorithm = algorithm.after({"policy/entropy_nats": entropy})
        applied.append(algorithm.loss_fn().config.entropy_coef)
        states.append(algorithm.state["entropy_coef"])
    assert states == pytest.approx([0.009, 0.014, 0.009, 0.004, 0.0, 0.0, 0.005])
    assert applied == pytest.approx([0.009, 0.014, 0.0, 0.0, 0.0, 0.0, 0.005])
    top = algorithm.at({"entropy_coef": 1.0}).after({"policy/entropy_nats": 0.1})
    assert top.state["entropy_coef"] == 1.0


@pytest.mark.parametrize("keep", [0.0, 0.75])
def test_a_reference_moves_every_few_steps_by_its_share(roles, keep):
    algorithm = Grpo(config=GrpoConfig(kl_coef=0.1, reference_every=3, reference_keep=keep))
    assert algorithm.roles()[REFERENCE].trained
    for step in (0, 1, 2):
        roles[POLICY].step = step
        old = {name: one.clone() for name, one in roles[REFERENCE].engine.named_weights()}
        algorithm.learn(roles, batch_of(algorithm))
        new = {name: one.clone() for name, one in roles[REFERENCE].engine.named_weights()}
        for name, policy in roles[POLICY].engine.named_weights():
            wanted = old[name] if step < 2 else keep * old[name] + (1 - keep) * policy
            torch.testing.assert_close(new[name], wanted, rtol=1e-5, atol=1e-6)
    roles[POLICY].step = 0


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"kl_in": KlIn.REWARD}, "algorithm.kl_in"),
        ({"kl_target": 0.1}, "algorithm.kl_target"),
        ({"reference_every": 3}, "algorithm.reference_every"),
        ({"kl_coef": 0.1, "reference_keep": 0.5}, "algorithm.reference_keep"),
        ({"kl_coef": 0.1, "kl_in": KlIn.REWARD, "per_turn": True}, "algorithm.kl_in"),
        ({"kl_coef": 0.1, "kl_in": KlIn.REWARD, "advantage": Advantage.MAX_RL}, "algorithm.kl_in"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(settings, setting):
    assert [refusal.setting for refusal in Grpo(config=GrpoConfig(**settings)).check()] == [setting]
