import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_rollout import Completion, Finish
from offbeat_trainer.algorithms.grpo import GRPO_EPSILON, Grpo, compute_advantages
from offbeat_trainer.config import Advantage, GrpoConfig
from offbeat_trainer.data.assemble import assemble
from offbeat_trainer.data.types import Group, Prompt, Score, Trajectory, Turn


def plain(kind, rewards):
    """The formulas once more, in plain Python."""
    mean = sum(rewards) / len(rewards)
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    if kind is Advantage.DR_GRPO:
        return [reward - mean for reward in rewards]
    if kind is Advantage.RLOO:
        others = [rewards[:i] + rewards[i + 1 :] for i in range(len(rewards))]
        return [reward - sum(rest) / len(rest) for reward, rest in zip(rewards, others, strict=True)]
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + GRPO_EPSILON) for reward in rewards]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        # Rewards 1, 0, 0, 0: mean 1/4, sample std sqrt((9/16 + 3/16) / 3) = 1/2.
        (Advantage.GRPO, [1.5, -0.5, -0.5, -0.5]),
        (Advantage.DR_GRPO, [0.75, -0.25, -0.25, -0.25]),
        (Advantage.RLOO, [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_by_hand(kind, wanted):
    got = compute_advantages(kind, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", Advantage)
@given(rewards=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=9))
def test_against_plain_python(kind, rewards):
    got = compute_advantages(kind, torch.tensor(rewards, dtype=torch.float64))
    wanted = torch.tensor(plain(kind, rewards), dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", Advantage)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=9))
def test_finite_rewards_give_finite_advantages(kind, rewards):
    assert compute_advantages(kind, torch.tensor(rewards)).isfinite().all()


@pytest.mark.parametrize("kind", Advantage)
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0], [-3.3] * 3])
def test_equal_rewards_teach_exactly_nothing(kind, rewards):
    assert compute_advantages(kind, torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("kind", Advantage)
def test_groups_do_not_see_each_other(kind):
    rewards_NG = torch.tensor([[1.0, 0.0, 0.5], [3.0, 3.0, 3.0], [-1.0, 2.0, 7.0]])
    got = compute_advantages(kind, rewards_NG)
    assert got.tolist() == [compute_advantages(kind, rewards_G).tolist() for rewards_G in rewards_NG]


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


@pytest.mark.parametrize("kind", Advantage)
@given(rewards=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=6), seed=st.integers(0, 99))
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
