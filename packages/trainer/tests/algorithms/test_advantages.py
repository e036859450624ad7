"""Estimates of groups and of the batch against their papers' formulas in plain loops, and mistakes planted in them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from made_groups import PLANTED, caught, made_group
from offbeat_rollout import Completion, Finish
from offbeat_trainer.algorithms.advantages import (
    GRPO_EPSILON,
    OF_REWARDS,
    Samples,
    compute_advantages,
    estimate,
    samples_of,
)
from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.config import Advantage, GrpoConfig
from offbeat_trainer.data.assemble import assemble
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory, Turn
from offbeat_trainer.errors import TrainerError

OF_SAMPLES = [kind for kind in Advantage if kind is not Advantage.OTB]  # which is of tokens: test_otb.py


def deviation(rewards):
    mean = sum(rewards) / len(rewards)
    return math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / max(len(rewards) - 1, 1))


def plain(kind, rewards, lengths=None, around=None):
    """The formulas once more, for one group; `around` are the rewards that a deviation is taken of, where not the group's."""
    mean = sum(rewards) / len(rewards)
    scale = deviation(around or rewards) + GRPO_EPSILON
    found = []
    for i, reward in enumerate(rewards):
        others = [other for j, other in enumerate(rewards) if j != i] or [reward]
        match kind:
            case Advantage.DR_GRPO:
                found.append(reward - mean)
            case Advantage.RLOO:
                found.append(reward - sum(others) / len(others))
            case Advantage.LOO_GRPO:
                found.append((reward - sum(others) / len(others)) / scale)
            case Advantage.OPO:
                baseline = np.dot(lengths, rewards) / sum(lengths) if sum(lengths) else mean
                found.append(reward - baseline)
            case Advantage.PASS_AT_K:
                is_best = rewards.index(max(rewards)) == i
                found.append((reward - max(others)) / scale if is_best else 0.0)
            case Advantage.MAX_RL:
                found.append((reward - mean) / mean if mean > 0 else 0.0)
            case _:
                found.append((reward - mean) / scale)
    return [0.0] * len(rewards) if len(set(rewards)) == 1 else found


def plain_batch(kind, batch):
    """The same for groups of (rewards, lengths, domain)."""
    found = []
    for rewards, lengths, domain in batch:
        of_batch = [reward for other, _, _ in batch for reward in other]
        of_domain = [reward for other, _, name in batch if name == domain for reward in other]
        around = {Advantage.BATCH_STD: of_batch, Advantage.DOMAIN_STD: of_domain}.get(kind)
        found += plain(kind, list(rewards), lengths, around)
    return torch.tensor(found, dtype=torch.float64)


def made(batch):
    return [
        made_group(str(index), rewards, lengths=lengths, data={"domain": domain} if domain else {})
        for index, (rewards, lengths, domain) in enumerate(batch)
    ]


BATCH = [
    ((1.0, 0.0, 0.0, 0.0), (3, 1, 0, 7), "sums"),
    ((0.5,), (2,), "sums"),
    ((2.0, 2.0, 2.0), (1, 2, 3), ""),
    ((9.0, 3.0), (5, 0), ""),
    ((0.25, 0.75, 0.75, 0.5), (0, 0, 0, 0), "sums"),
]


@st.composite
def batches(draw, least=-50):
    """Groups of 1 to 5 completions, some of equal rewards, some without tokens, in up to three domains."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    reward = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(least, 50, width=32).map(lambda x: round(x, 3)))
    lengths = st.integers(0, 9)
    return [
        (
            tuple(draw(st.lists(reward, min_size=size, max_size=size))),
            tuple(draw(st.lists(lengths, min_size=size, max_size=size))),
            draw(st.sampled_from(["", "sums", "words"])),
        )
        for size in sizes
    ]


def targets_of(kind, groups):
    return Grpo(config=GrpoConfig(advantage=kind)).targets(groups)["advantages"]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        # Rewards 1, 0, 0, 0: mean 1/4, sample std sqrt((9/16 + 3/16) / 3) = 1/2; OPO's baseline is 4/10.
        (Advantage.GRPO, [1.5, -0.5, -0.5, -0.5]),
        (Advantage.DR_GRPO, [0.75, -0.25, -0.25, -0.25]),
        (Advantage.RLOO, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (Advantage.LOO_GRPO, [2.0, -2 / 3, -2 / 3, -2 / 3]),
        (Advantage.OPO, [0.6, -0.4, -0.4, -0.4]),
        (Advantage.PASS_AT_K, [2.0, 0.0, 0.0, 0.0]),
        (Advantage.MAX_RL, [3.0, -1.0, -1.0, -1.0]),
        (Advantage.BATCH_STD, [1.5, -0.5, -0.5, -0.5]),
        (Advantage.DOMAIN_STD, [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_by_hand(kind, wanted):
    got = compute_advantages(kind, torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([4, 3, 2, 1]))
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", OF_SAMPLES)
@given(data=st.data())
def test_against_plain_loops(kind, data):
    batch = data.draw(batches(least=0 if kind is Advantage.MAX_RL else -50))
    torch.testing.assert_close(targets_of(kind, made(batch)), plain_batch(kind, batch), rtol=1e-7, atol=1e-7)


def others_deviation(function, samples):
    """What NeMo-RL's leave-one-out did: without the sample's own reward in the deviation, too."""
    groups = samples.groups.tolist()
    rewards = samples.rewards.tolist()
    found = []
    for i, (group, reward) in enumerate(zip(groups, rewards, strict=True)):
        others = [other for j, other in enumerate(rewards) if groups[j] == group and j != i] or [reward]
        found.append((reward - sum(others) / len(others)) / (deviation(others) + GRPO_EPSILON))
    return torch.tensor(found, dtype=torch.float64)


def one_domain(function, samples):
    return function(Samples.of(samples.rewards, samples.groups, samples.lengths))


def one_length(function, samples):
    return function(Samples(**{name: getattr(samples, name) for name in ("rewards", "groups", "domains", "baselines")}, lengths=torch.ones_like(samples.lengths)))  # fmt: skip


def over_g(function, samples):
    return function(samples) * math.sqrt(4 / 3)


MISTAKES = [
    *((kind, name, wrong) for kind in OF_SAMPLES for name, wrong in PLANTED.items()),
    (Advantage.LOO_GRPO, "deviation of the others", others_deviation),
    (Advantage.GRPO, "deviation over G", over_g),
    (Advantage.OPO, "lengths not looked at", one_length),
    (Advantage.DOMAIN_STD, "domains not looked at", one_domain),
    (Advantage.PASS_AT_K, "every large one", lambda function, samples: function(samples).clamp(min=0.1)),
    (Advantage.MAX_RL, "not divided", lambda _, samples: estimate(Advantage.DR_GRPO, samples)),
    (Advantage.BATCH_STD, "the group's deviation", lambda _, samples: estimate(Advantage.GRPO, samples)),
]


@pytest.mark.parametrize(("kind", "name", "wrong"), MISTAKES)
def test_a_planted_mistake_is_caught(kind, name, wrong):
    del name
    samples = samples_of(made(BATCH))

    def check(function):
        torch.testing.assert_close(function(samples), plain_batch(kind, BATCH), rtol=1e-7, atol=1e-7)

    assert caught(check, lambda given: estimate(kind, given), wrong)


@pytest.mark.parametrize("kind", OF_SAMPLES)
@given(data=st.data())
def test_the_order_of_groups_and_of_completions_does_not_matter(kind, data):
    batch = data.draw(batches(least=0 if kind is Advantage.MAX_RL else -50))
    samples = samples_of(made(batch))
    order = data.draw(st.permutations(range(len(samples.rewards))))
    straight, shuffled = estimate(kind, samples), estimate(kind, samples.at(order))
    torch.testing.assert_close(shuffled, straight[torch.tensor(order)], rtol=1e-9, atol=1e-9)


SCALED = {
    Advantage.GRPO: 0, Advantage.LOO_GRPO: 0, Advantage.PASS_AT_K: 0, Advantage.MAX_RL: 0, Advantage.BATCH_STD: 0,
    Advantage.DOMAIN_STD: 0, Advantage.DR_GRPO: 1, Advantage.RLOO: 1, Advantage.OPO: 1,
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_SAMPLES)
def test_rewards_of_another_size_and_another_zero(kind):
    """What divides by a deviation or a mean is of degree 0 in the rewards, what does not of degree 1; but for MaxRL a constant is lost."""
    samples = samples_of(made(BATCH))
    plus, times = samples.rewards + 3, samples.rewards * 8
    shifted, scaled = (Samples(**{name: getattr(samples, name) for name in ("groups", "lengths", "domains", "baselines")}, rewards=one) for one in (plus, times))  # fmt: skip
    straight = estimate(kind, samples)
    torch.testing.assert_close(estimate(kind, scaled), straight * 8.0 ** SCALED[kind], rtol=1e-5, atol=1e-9)
    moved = estimate(kind, shifted)
    assert torch.allclose(moved, straight, rtol=1e-9, atol=1e-9) is (kind is not Advantage.MAX_RL)


@pytest.mark.parametrize("kind", OF_SAMPLES)
@given(data=st.data())
def test_finite_rewards_give_finite_advantages(kind, data):
    least = 0 if kind is Advantage.MAX_RL else None
    reward = st.floats(least, allow_nan=False, allow_infinity=False, width=32)
    rewards = data.draw(st.lists(reward, min_size=1, max_size=9))
    assert compute_advantages(kind, torch.tensor(rewards)).isfinite().all()


@pytest.mark.parametrize("kind", OF_SAMPLES)
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0], [3.3] * 3, []])
def test_equal_rewards_teach_exactly_nothing(kind, rewards):
    assert compute_advantages(kind, torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("kind", OF_REWARDS)
def test_groups_do_not_see_each_other(kind):
    rewards_NG = torch.tensor([[1.0, 0.0, 0.5], [3.0, 3.0, 3.0], [1.0, 2.0, 7.0]])
    got = compute_advantages(kind, rewards_NG)
    assert got.tolist() == [compute_advantages(kind, rewards_G).tolist() for rewards_G in rewards_NG]


def test_max_rl_takes_no_negative_reward():
    with pytest.raises(
        TrainerError, match=r"max_rl` divides by the mean reward and needs rewards >= 0, got -0\.5"
    ):
        targets_of(Advantage.MAX_RL, [made_group("p", (1.0, -0.5))])


def test_a_success_that_only_one_had_teaches_with_the_deviation_of_all():
    """With the deviation of the others it would be divided by the epsilon alone, or left out."""
    assert targets_of(Advantage.LOO_GRPO, [made_group("p", (1.0, 0.0, 0.0, 0.0))])[0] == pytest.approx(
        2.0, abs=1e-5
    )


@pytest.mark.parametrize("kind", OF_SAMPLES)
def test_no_groups_and_groups_without_completions_are_no_error(kind):
    assert targets_of(kind, []).shape == (0,)
    assert targets_of(kind, [made_group("p", ()), made_group("q", (1.0, 0.0))]).shape == (2,)


def talk(*turns):
    """A trajectory whose turns are (tokens observed, tokens sampled, reward)."""
    made = [
        Turn(
            completion=Completion.of(
                request_id="r", token_ids=[3] * sampled, logprobs=[-1.0] * sampled, policy_versions=[1] * sampled, finish=Finish.STOP
            ),
            observed=np.full(observed, 5, np.int32),
            reward=reward,
        )
        for observed, sampled, reward in turns
    ]  # fmt: skip
    return Trajectory(turns=tuple(made), finish=Finish.STOP)


def a_group(*talks):
    """Trajectories with what each is worth in all."""
    scores = tuple(Score(reward=reward, correct=False) for _, reward in talks)
    return Group(
        prompt=Prompt(uid="p", text="", token_ids=(1, 2)),
        trajectories=tuple(one for one, _ in talks),
        scores=scores,
    )


def test_turns_by_hand():
    """To go: 3, 2; 0, 1, 1 (the last earned what no turn did, 1); 6.

    First turns: mean 3. Second turns, of the two that have one: mean 1.5. A third, which one alone has: nothing.
    """
    group = a_group(
        (talk((0, 2, 1.0), (1, 1, 2.0)), 3.0),
        (talk((0, 1, -1.0), (2, 1, 0.0), (0, 1, 0.0)), 0.0),
        (talk((0, 1, 6.0)), 6.0),
    )
    algorithm = Grpo(config=GrpoConfig(advantage=Advantage.DR_GRPO, per_turn=True))
    batch = assemble([group], algorithm.targets([group]), temperature=1.0)
    assert batch["advantages"].tolist() == [
        [0, 0, 0, 0, 0, 0.5, 0],
        [0, 0, -3, 0, 0, -0.5, 0],
        [0, 0, 3, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize("kind", OF_SAMPLES)
@given(rewards=st.lists(st.floats(0, 100, width=32), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_one_turn_is_a_turn(kind, rewards, seed):
    groups = [
        a_group(*((talk((0, (seed + i) % 4, 0.0)), reward) for i, reward in enumerate(rewards)))
        for _ in range(2)
    ]
    per_turn, whole = (
        assemble(
            groups,
            Grpo(config=GrpoConfig(advantage=kind, per_turn=per_turn)).targets(groups),
            temperature=1.0,
        )
        for per_turn in (True, False)
    )
    assert torch.equal(per_turn["advantages"], whole["advantages"])


@pytest.mark.parametrize("kind", OF_SAMPLES)
def test_each_turn_is_an_estimate_of_what_was_earned_from_it_on(kind):
    """Two groups of different turns; the lengths of turn k are the tokens sampled from it on."""
    first = a_group((talk((0, 2, 1.0), (1, 1, 2.0)), 3.0), (talk((0, 1, 1.0), (2, 4, 0.5)), 1.5))
    second = a_group((talk((0, 3, 6.0)), 6.0), (talk((0, 1, 0.0), (1, 5, 4.0)), 4.0))
    whole = [((3.0, 1.5), (3, 5), ""), ((6.0, 4.0), (3, 6), "")]
    later = [((2.0, 0.5), (1, 4), ""), ((4.0,), (5,), "")]
    one, two = plain_batch(kind, whole).tolist(), plain_batch(kind, later).tolist()
    wanted = [
        [one[0]] * 2 + [two[0]] * 2,
        [one[1]] + [two[1]] * 6,
        [one[2]] * 3,
        [one[3]] + [two[2]] * 6,
    ]
    got = Grpo(config=GrpoConfig(advantage=kind, per_turn=True)).targets([first, second])["advantages"]
    for row, values in zip(got.tolist(), wanted, strict=True):
        assert row == pytest.approx(values + [0.0] * (7 - len(values)))
