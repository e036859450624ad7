"""GDPO: each part of a reward normalised by itself, weighed, added and whitened."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from made_groups import PLANTED, caught, made_group
from offbeat_trainer import KlIn, StepShape, TrainerError, algorithm_class
from offbeat_trainer.algorithms.policy.configs import GdpoConfig
from offbeat_trainer.algorithms.trial import trial

WEIGHTS = {"format": 0.5}
BATCH = [
    [{"right": 1.0, "format": 0.0}, {"right": 0.0, "format": 1.0}, {"right": 0.0, "format": 0.3}],
    [{"right": 0.0, "format": 1.0}, {"right": 0.0, "format": 0.2}],
    [{"right": 1.0, "format": 1.0}],
]


def plain(batch, weights):
    """Equations 4 to 6 of the paper, with the house's epsilons."""
    sums = []
    for group in batch:
        for one in group:
            total = 0.0
            for name in one:
                column = [other[name] for other in group]
                mean = sum(column) / len(column)
                freedom = max(len(column) - 1, 1)
                sigma = math.sqrt(sum((value - mean) ** 2 for value in column) / freedom)
                if len(set(column)) > 1:
                    total += weights.get(name, 1.0) * (one[name] - mean) / (sigma + 1e-6)
            sums.append(total)
    if len(set(sums)) < 2:
        return [0.0] * len(sums)
    mean = sum(sums) / len(sums)
    variance = sum((value - mean) ** 2 for value in sums) / max(len(sums) - 1, 1)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in sums]


def made(batch):
    return [
        made_group(str(index), [sum(one.values()) for one in group], parts=group)
        for index, group in enumerate(batch)
    ]


def of(weights=None, **settings):
    return algorithm_class("gdpo")(config=GdpoConfig(part_weights=weights or {}, **settings))


PART = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-9, 9).map(lambda x: round(x, 2)))
ONE = st.fixed_dictionaries({"right": PART, "format": PART})


@given(batch=st.lists(st.lists(ONE, min_size=1, max_size=4), min_size=1, max_size=4))
def test_against_plain_loops(batch):
    got = of(WEIGHTS).targets(made(batch))["advantages"]
    torch.testing.assert_close(
        got, torch.tensor(plain(batch, WEIGHTS), dtype=torch.float64), rtol=1e-5, atol=1e-5
    )


def whole(function, groups):
    """Normalised after the sum, which is what GDPO is against."""
    plainly = [made_group(group.prompt.uid, [score.reward for score in group.scores]) for group in groups]
    return function(plainly)


MISTAKES = {**PLANTED, "the sum normalised": whole, "one group alone": lambda function, groups: torch.cat([function([group]) for group in groups])}  # fmt: skip


@pytest.mark.parametrize("wrong", MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_is_caught(wrong):
    groups = made(BATCH)

    def check(function):
        wanted = torch.tensor(plain(BATCH, {}), dtype=torch.float64)
        torch.testing.assert_close(function(groups), wanted, rtol=1e-6, atol=1e-6)

    assert caught(check, lambda given: of().targets(given)["advantages"], wrong)


def test_a_part_of_another_size_does_not_hide_the_others():
    larger = [[{**one, "format": 1000 * one["format"]} for one in group] for group in BATCH]
    straight, scaled = (of().targets(made(batch))["advantages"] for batch in (BATCH, larger))
    torch.testing.assert_close(scaled, straight, rtol=1e-4, atol=1e-4)


def test_weights_and_parts_that_do_not_fit_are_refused():
    with pytest.raises(
        TrainerError, match=r"`part_weights` names \['style'\]; the rewards are \['format', 'right'\]"
    ):
        of({"style": 1.0}).targets(made(BATCH))
    with pytest.raises(
        TrainerError, match=r"the same reward parts, got \['right'\] beside \['format', 'right'\]"
    ):
        of().targets(made([[{"right": 1.0}, {"right": 1.0, "format": 0.0}]]))
    assert [refusal.setting for refusal in of(kl_in=KlIn.REWARD, kl_coef=0.1).check()] == ["algorithm.kl_in"]


def test_it_passes_the_trial_with_weights_of_parts_that_only_the_task_has():
    assert trial(of(WEIGHTS))
    assert of().check() == []
    assert of().targets([])["advantages"].shape == (0,)
    small = algorithm_class("gdpo")(config=GdpoConfig(), step=StepShape(group_size=1))
    assert [refusal.setting for refusal in small.check()] == ["trainer.group_size"]
