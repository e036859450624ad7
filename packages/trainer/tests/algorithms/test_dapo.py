"""DAPO: groups and completions that are left out, and rewards that fall towards the longest length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from made_groups import caught, made_group
from offbeat_rollout import Finish
from offbeat_trainer import Aggregation, DapoConfig, GrpoConfig, KlIn, StepShape, algorithm_class
from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.algorithms.policy.dapo import overlong_penalty
from offbeat_trainer.algorithms.trial import trial
from offbeat_trainer.data.assemble import assemble


def of(longest=10, **settings):
    return algorithm_class("dapo")(
        config=DapoConfig(**settings), step=StepShape(max_completion_tokens=longest)
    )


def plain(length, longest, tokens):
    """Equation 13, three cases, as what is taken from the reward."""
    if length <= longest - tokens:
        return 0.0
    if length <= longest:
        return -((longest - tokens) - length) / tokens
    return 1.0


@given(st.integers(0, 40), st.integers(1, 30), st.sampled_from([0.1, 0.2, 0.5, 1.0]))
def test_the_penalty_against_the_three_cases_of_the_paper(length, longest, buffer):
    assert overlong_penalty(length, longest, buffer) == pytest.approx(
        plain(length, longest, buffer * longest)
    )
    assert overlong_penalty(length, longest, 0.0) == 0


def test_the_penalty_of_the_papers_settings():
    """L = 20480, a buffer of 4096."""
    assert [overlong_penalty(length, 20480, 0.2) for length in (16384, 18432, 20480)] == [0.0, 0.5, 1.0]


MISTAKES = {
    "sign": lambda function, *given: -function(*given),
    "begins at the end": lambda function, length, longest, buffer: function(length - buffer * longest, longest, buffer),
    "not divided by the buffer": lambda function, length, longest, buffer: function(length, longest, buffer) * buffer * longest,
}  # fmt: skip


@pytest.mark.parametrize("wrong", MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_in_the_penalty_is_caught(wrong):
    def check(function):
        for length in range(25):
            assert abs(function(length, 20, 0.2) - plain(length, 20, 4)) < 1e-9

    assert caught(check, overlong_penalty, wrong)


def test_its_defaults_are_the_papers():
    config = DapoConfig()
    assert (config.clip_low, config.clip_high, config.aggregation) == (0.2, 0.28, Aggregation.TOKEN_MEAN)
    assert (config.dynamic_sampling, config.overlong_buffer, config.kl_coef) == (True, 4096 / 20480, 0.0)


def test_flat_groups_and_what_was_cut_off_are_left_out():
    dapo = of(overlong_buffer=0.0)
    kept = [dapo.keeps(made_group("p", rewards)) for rewards in ((1, 1), (0, 0), (0, 1))]
    assert kept == ["flat", "flat", ""]
    assert of(dynamic_sampling=False).keeps(made_group("p", (1, 1))) == ""
    groups = [
        made_group("p", (0, 1), finishes=(Finish.LENGTH, Finish.STOP)),
        made_group("q", (1, 0), finishes=(Finish.STOP, Finish.LENGTH)),
    ]
    batch = assemble(groups, dapo.targets(groups), temperature=1.0)
    assert batch["loss_mask"].sum(1).tolist() == [0, 2, 1, 0]
    plainly = Grpo(config=GrpoConfig()).targets(groups)["advantages"]
    assert torch.equal(dapo.targets(groups)["advantages"], plainly)


def test_groups_are_flat_by_what_was_earned_and_compared_by_what_is_left_of_it():
    group = made_group("p", (1.0, 1.0), lengths=(4, 9))
    dapo = of()
    assert dapo.keeps(group) == "flat"
    found = dapo.targets([group, made_group("q", (0.0, 1.0), lengths=(10, 1))])
    assert found["dapo/overlong_penalty"].tolist() == [0.0, 0.5, 1.0, 0.0]
    less = [made_group("p", (1.0, 0.5)), made_group("q", (-1.0, 1.0))]
    assert torch.equal(found["advantages"], Grpo(config=GrpoConfig()).targets(less)["advantages"])


def test_the_mean_penalty_is_a_metric_and_no_key_of_what_is_trained():
    seen = {}

    class Policy:
        step = 0

        def shares(self, batch, updates):
            seen["keys"] = set(map(str, batch.keys()))
            return [batch] * updates

        def train(self, shares, loss_fn):
            return []

    dapo = of(longest=4, overlong_buffer=0.5)
    groups = [made_group("p", (1.0, 0.0, 0.0, 0.0))]
    batch = assemble(groups, dapo.targets(groups), temperature=1.0)
    [metric] = dapo.learn({"policy": Policy()}, batch)
    assert (metric.key, metric.reduction.value()) == ("dapo/overlong_penalty", (0 + 0 + 0.5 + 1) / 4)
    assert "dapo/overlong_penalty" not in seen["keys"]


def test_it_passes_the_trial_and_empty_steps():
    assert of().check() == []
    assert trial(of(longest=32))
    assert trial(of(longest=2, kl_in=KlIn.REWARD, kl_coef=0.1))
    assert of().targets([])["advantages"].shape == (0,)
