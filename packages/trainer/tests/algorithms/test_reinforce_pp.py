"""REINFORCE++ and its baseline form: whitened over the tokens of the step, against plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from made_groups import PLANTED, caught, made_group
from offbeat_trainer import Advantage, GrpoConfig, StepShape, algorithm_class
from offbeat_trainer.algorithms.advantages import samples_of, whiten
from offbeat_trainer.algorithms.trial import trial

BATCH = [((1.0, 0.0), (3, 1)), ((5.0,), (2,)), ((2.0, 2.0, 7.0), (0, 4, 4))]
NAMES = ("reinforce_pp", "reinforce_pp_baseline")


def of(name, **step):
    return algorithm_class(name)(config=GrpoConfig(), step=StepShape(**step))


def plain(name, batch):
    """Each token of a completion has its reward, less the group's mean in the baseline form, and all tokens are whitened together."""
    tokens, values = [], []
    for rewards, lengths in batch:
        mean = sum(rewards) / len(rewards) if name == "reinforce_pp_baseline" else 0.0
        for reward, length in zip(rewards, lengths, strict=True):
            values.append((0.0 if len(set(rewards)) == 1 and mean else reward - mean, length))
            tokens += [values[-1][0]] * length
    if len(set(tokens)) < 2:
        return [0.0] * len(values)
    mean = sum(tokens) / max(len(tokens), 1)
    variance = sum((token - mean) ** 2 for token in tokens) / max(len(tokens) - 1, 1)
    return [(value - mean) / math.sqrt(variance + 1e-8) if length else 0.0 for value, length in values]


def groups_of(batch):
    return [
        made_group(str(index), rewards, lengths=lengths) for index, (rewards, lengths) in enumerate(batch)
    ]


@st.composite
def batches(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    number = st.floats(-9, 9, width=32).map(lambda x: round(x, 2))
    return [
        (
            tuple(draw(st.lists(number, min_size=size, max_size=size))),
            tuple(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))),
        )
        for size in sizes
    ]


@pytest.mark.parametrize("name", NAMES)
@given(batch=batches())
def test_against_plain_loops(name, batch):
    got = of(name).targets(groups_of(batch))["advantages"]
    wanted = torch.tensor(plain(name, batch), dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_of_a_step_have_mean_0_and_variance_1(name):
    got = of(name).targets(groups_of(BATCH))["advantages"].numpy()
    tokens_M = np.repeat(got, [length for _, lengths in BATCH for length in lengths])
    assert (tokens_M.mean(), tokens_M.var(ddof=1)) == pytest.approx((0, 1), abs=1e-7)


MISTAKES = {
    **PLANTED,
    "over completions": lambda function, samples: function(type(samples).of(samples.rewards, samples.groups)),
    "over a group": lambda function, samples: torch.cat(
        [function(samples.at((samples.groups == group).nonzero().flatten().tolist())) for group in range(3)]
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_is_caught(name, wrong):
    samples = samples_of(groups_of(BATCH))
    wanted = torch.tensor(plain(name, BATCH), dtype=torch.float64)

    def check(function):
        torch.testing.assert_close(function(samples), wanted, rtol=1e-6, atol=1e-6)

    assert caught(check, of(name).estimate, wrong)


@given(batch=batches(), data=st.data())
def test_the_order_of_completions_does_not_matter(batch, data):
    samples = samples_of(groups_of(batch))
    order = data.draw(st.permutations(range(len(samples.rewards))))
    straight, at = whiten(samples.rewards, samples.lengths), samples.at(order)
    torch.testing.assert_close(
        whiten(at.rewards, at.lengths), straight[torch.tensor(order)], rtol=1e-6, atol=1e-6
    )


def test_neither_size_nor_zero_of_the_rewards_matters():
    samples = samples_of(groups_of(BATCH))
    moved = whiten(samples.rewards * 4 - 7, samples.lengths)
    torch.testing.assert_close(moved, whiten(samples.rewards, samples.lengths), rtol=1e-7, atol=1e-7)


def test_one_completion_of_a_prompt_is_enough_and_equal_rewards_teach_nothing():
    algorithm = of("reinforce_pp", group_size=1)
    assert algorithm.check() == []
    assert trial(algorithm)
    assert trial(of("reinforce_pp_baseline"))
    assert [refusal.setting for refusal in of("reinforce_pp_baseline", group_size=1).check()] == [
        "trainer.group_size"
    ]
    for name in NAMES:
        assert (
            of(name).targets([made_group("p", (0.1,) * 3), made_group("q", (0.1,))])["advantages"].tolist()
            == [0.0] * 4
        )


def test_settings_that_choose_nothing_here_are_refused():
    for name in (*NAMES, "remax", "gpg"):
        cls = algorithm_class(name)
        refused = cls(config=cls.Config(advantage=Advantage.OPO, per_turn=True)).check()
        assert [refusal.setting for refusal in refused] == ["algorithm.advantage", "algorithm.per_turn"]
