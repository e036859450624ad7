"""The optimal token baseline beside its formula in float64 NumPy loops, its invariances, mistakes planted in it, and real engines."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from made_groups import PLANTED, caught, made_group
from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model
from offbeat_rollout import Completion, Finish
from offbeat_trainer import Advantage, Grpo, GrpoConfig, KlIn, Role, StepShape, TrainerError
from offbeat_trainer.algorithms import grpo
from offbeat_trainer.algorithms.advantages import (
    advantages_of,
    compute_advantages,
    from_batch,
    otb,
    token_advantages,
)
from offbeat_trainer.algorithms.trial import trial
from offbeat_trainer.data.assemble import assemble
from offbeat_trainer.data.types import Trajectory, Turn

ALGORITHM = Grpo(config=GrpoConfig(advantage=Advantage.OTB), step=StepShape(updates_per_step=2))


def draw(seed, num=5, most=7):
    """Rewards, energies and sampled tokens of a group; one completion has no token, one is the longest by itself."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, most, num)
    lengths[0], lengths[-1] = 0, most
    sampled = np.arange(most) < lengths[:, None]
    return random.choice([0.0, 0.25, 1.0], num), random.random((num, most)) * 2, sampled


def reference(rewards, energies, sampled):
    """Equations of the paper, a completion and a token at a time."""
    found = np.zeros(energies.shape)
    if len(set(rewards)) < 2:
        return found
    for t in range(energies.shape[1]):
        there = [i for i in range(len(rewards)) if sampled[i, t]]
        if len(there) < 2:
            continue
        weights = {i: sum(energies[i, j] for j in range(t + 1)) for i in there}
        if not sum(weights.values()):
            weights = dict.fromkeys(there, 1.0)
        baseline = sum(weights[i] * rewards[i] for i in there) / sum(weights.values())
        for i in there:
            found[i, t] = rewards[i] - baseline
    return found


def call(function, rewards, energies, sampled):
    return function(*(torch.tensor(one) for one in (rewards, energies, sampled))).numpy()


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_formula_of_the_paper(seed):
    group = draw(seed, num=1 + seed % 6)
    np.testing.assert_allclose(call(otb, *group), reference(*group), rtol=1e-12, atol=1e-12)


def not_cumulative(function, rewards, energies, sampled):
    return function(rewards, torch.cat((energies[:, :1], energies.diff(dim=1)), 1), sampled)


def not_weighted(function, rewards, energies, sampled):
    return function(rewards, torch.zeros_like(energies), sampled)


def of_others_too(function, rewards, energies, sampled):
    return function(rewards, energies, torch.ones_like(sampled)) * sampled


def tail_of_verl(function, rewards, energies, sampled):
    return torch.where(sampled & (sampled.sum(0) < 2), rewards[:, None], function(rewards, energies, sampled))


WRONG = {"steps": not_cumulative, "mean": not_weighted, "absent": of_others_too, "tail": tail_of_verl}


@pytest.mark.parametrize("name", [*PLANTED, *WRONG])
def test_a_planted_mistake_is_caught(name):
    group = draw(7, num=8)

    def check(function):
        np.testing.assert_allclose(call(function, *group), reference(*group), rtol=1e-7, atol=1e-7)

    assert caught(check, otb, {**PLANTED, **WRONG}[name])


def test_order_and_padding_change_nothing_a_shift_of_rewards_neither_and_their_size_is_kept():
    rewards, energies, sampled = draw(10, num=8)
    straight = call(otb, rewards, energies, sampled)
    order = np.random.default_rng(0).permutation(len(rewards))
    np.testing.assert_allclose(
        call(otb, rewards[order], energies[order], sampled[order]), straight[order], atol=1e-12
    )
    wide = np.pad(energies, ((0, 0), (0, 3)), constant_values=5.0), np.pad(sampled, ((0, 0), (0, 3)))
    np.testing.assert_allclose(call(otb, rewards, *wide)[:, : energies.shape[1]], straight, atol=1e-12)
    np.testing.assert_allclose(call(otb, 3 + 8 * rewards, energies, sampled), 8 * straight, atol=1e-11)


def test_no_other_baseline_has_less_variance():
    """Of sum W (r - b)^2, the variance but for what b does not change, b_t is the minimum: another one to either side has more."""
    rewards, energies, sampled = draw(1, num=8)
    weights = energies.cumsum(1) * sampled
    baseline = rewards[:, None] - call(otb, rewards, energies, sampled)
    for t in np.flatnonzero(sampled.sum(0) > 1):
        own = sampled[:, t]
        [value] = np.unique(baseline[own, t].round(12))
        least, *more = (
            (weights[own, t] * (rewards[own] - value - step) ** 2).sum() for step in (0, -1e-3, 1e-3)
        )
        assert least < min(more)


@pytest.mark.parametrize("rewards", [[0.1] * 4, [3.3]])
def test_equal_rewards_teach_exactly_nothing(rewards):
    energies = torch.rand(len(rewards), 5)
    assert not otb(torch.tensor(rewards), energies, torch.ones(len(rewards), 5, dtype=torch.bool)).any()


def test_where_nothing_was_open_the_baseline_is_the_mean():
    rewards, sampled = torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.ones(4, 2, dtype=torch.bool)
    energies = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 0.0], [0.0, 0.0]])
    assert otb(rewards, energies, sampled).tolist() == [[0.5, 0.75], [-0.5, -0.25], [0.0, 0.25], [0.0, 0.25]]


def said(*ids):
    return Completion.of(
        request_id="r",
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        policy_versions=[1] * len(ids),
        finish=Finish.STOP,
    )


def groups():
    """Three groups, one of one completion; a completion has two rows and observed tokens, and one has no token."""
    first = made_group("p", (1.0, 0.0, 0.5), lengths=(3, 0, 5))
    second = made_group("q", (0.0, 2.0, 1.0), lengths=(1, 4, 2))
    edited = Trajectory(
        turns=(
            Turn(completion=said(4, 5)),
            Turn(completion=said(6), observed=np.array([9], np.int32)),
            Turn(completion=said(6, 7, 8), context=np.array([1, 3], np.int32)),
        ),
        finish=Finish.STOP,
    )
    alone = made_group("s", (1.0,))
    return [first, replace(second, trajectories=(edited, *second.trajectories[1:])), alone]


def batch_of(algorithm):
    found = groups()
    return assemble(found, algorithm.targets(found), temperature=1.0)


def test_the_advantages_of_a_trajectory_are_those_of_its_tokens_whatever_rows_they_lie_in():
    found = groups()
    lengths = [one.num_tokens for group in found for one in group.trajectories]
    numbers_BC = torch.arange(len(lengths))[:, None] * 100.0 + torch.arange(max(lengths)) + 1
    batch = assemble(found, {"advantages": numbers_BC}, temperature=1.0)
    told = advantages_of(found, batch)
    wanted = [own[:length].tolist() for own, length in zip(numbers_BC, lengths, strict=True)]
    wanted[3][2] = 0.0  # observed: not trained
    assert [one.tolist() for one in told] == wanted


@pytest.mark.parametrize("settings", [{"advantage": Advantage.OTB}, {"kl_in": KlIn.REWARD, "kl_coef": 0.1}])
def test_advantages_that_the_ranks_make_are_not_known_before(settings):
    assert advantages_of(groups(), batch_of(Grpo(config=GrpoConfig(**settings)))) is None


def plain(batch, energies_BT):
    """The advantages [B, T] of `groups`, whose fourth trajectory has two rows."""
    trajectories, row = [], 0
    for rows in (1, 1, 1, 2, 1, 1, 1):
        trajectories.append(
            [(b, int(t)) for b in range(row, row + rows) for t in batch["loss_mask"][b].nonzero()]
        )
        row += rows
    wanted = np.zeros(batch["loss_mask"].shape)
    for part, rewards in (
        (trajectories[:3], [1, 0, 0.5]),
        (trajectories[3:6], [0, 2, 1]),
        (trajectories[6:], [1]),
    ):
        most = max(map(len, part))
        sampled = np.array([[j < len(one) for j in range(most)] for one in part])
        energies = np.array(
            [[float(energies_BT[one[j]]) if j < len(one) else 0.0 for j in range(most)] for one in part]
        )
        found = reference(np.array(rewards, float), energies, sampled)
        for i, one in enumerate(part):
            for j, place in enumerate(one):
                wanted[place] = found[i, j]
    return wanted


def test_tokens_of_a_completion_are_counted_through_its_turns_and_rows():
    samples, batch = from_batch(batch_of(ALGORITHM))
    energies_BT = torch.rand(batch["loss_mask"].shape, generator=torch.Generator().manual_seed(0))
    got = token_advantages(samples, batch, energies_BT)
    np.testing.assert_allclose(got.numpy(), plain(batch, energies_BT), atol=1e-6)
    assert got.dtype is torch.float32
    assert got.any()


class Watching(Role):
    """Keeps what it was trained on."""

    def shares(self, batch, num_updates=1):
        self.batch = batch.clone()
        return super().shares(batch, num_updates)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    torch.set_num_threads(1)
    path = str(make_tiny_model(tmp_path_factory.mktemp("policy") / "tiny", initializer_range=0.3))
    settings = Fsdp2Config(model=ModelConfig(path=path), optimizer=OptimizerConfig(lr=1e-3))
    engine = engine_class("fsdp2")(settings, World())
    engine.init_model()
    yield Watching(engine)
    engine.close()


def energies_of(policy, batch):
    """|onehot - p|^2 of each token, by the whole vocabulary, in float64."""
    share = batch.copy()
    policy.judge_top([share], "distill/teacher_top", 1 << 20)
    found = torch.zeros(batch["loss_mask"].shape, dtype=torch.float64)
    for b, t in batch["loss_mask"].nonzero().tolist():
        gradient = -share["distill/teacher_top"][b, t].double().exp()
        gradient[share["top_ids"][b, t] == batch["input_ids"][b, t]] += 1
        found[b, t] = gradient.square().sum()
    return found


def test_an_engine_tells_the_square_of_the_gradient_and_the_policy_learns_by_it(policy, monkeypatch):
    _, batch = from_batch(batch_of(ALGORITHM))
    batch = batch.exclude("sample/index")
    wanted, mask = energies_of(policy, batch), batch["loss_mask"]
    torch.testing.assert_close(
        policy.whole_energies(batch, 1 << 20)[mask].double(), wanted[mask], atol=1e-5, rtol=0
    )
    few = policy.whole_energies(batch, 8)[mask].double()
    assert (few <= wanted[mask] + 1e-5).all(), "the squares of the rest are left out"
    assert (wanted[mask] - few).max() < 1 / 8
    monkeypatch.setattr(grpo, "LIKELIEST", 1 << 20)
    ALGORITHM.learn({"policy": policy}, batch_of(ALGORITHM))
    np.testing.assert_allclose(policy.batch["advantages"].numpy(), plain(batch, wanted), atol=1e-4)
    assert "old_logprobs" not in policy.batch
    assert not [key for key in map(str, policy.batch.keys()) if key.startswith("sample/")]


def test_it_asks_for_an_engine_that_names_tokens_and_is_not_of_rewards_alone():
    assert ALGORITHM.roles()["policy"].names_tokens
    assert not Grpo(config=GrpoConfig()).roles()["policy"].names_tokens
    assert trial(ALGORITHM)
    with pytest.raises(TrainerError, match="is of tokens, by the policy's probabilities"):
        compute_advantages(Advantage.OTB, torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("settings", [{"per_turn": True}, {"kl_in": KlIn.REWARD, "kl_coef": 0.1}])
def test_what_it_does_not_go_with_is_refused(settings):
    algorithm = replace(ALGORITHM, config=replace(ALGORITHM.config, **settings))
    assert [one.setting for one in algorithm.check()] == ["algorithm.advantage"]
