"""ReMax: the greedy completion of the prompt as the baseline."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from made_groups import PLANTED, caught, made_group
from offbeat_trainer import GrpoConfig, StepShape, algorithm_class
from offbeat_trainer.algorithms.advantages import samples_of
from offbeat_trainer.algorithms.trial import trial

NUMBER = st.floats(-100, 100, width=32)


def of(**step):
    return algorithm_class("remax")(config=GrpoConfig(), step=StepShape(**step))


@given(batch=st.lists(st.tuples(st.lists(NUMBER, min_size=1, max_size=4), NUMBER), min_size=1, max_size=5))
def test_against_plain_loops(batch):
    groups = [made_group(str(i), tuple(rewards), greedy=greedy) for i, (rewards, greedy) in enumerate(batch)]
    wanted = []
    for rewards, greedy in batch:
        wanted += [reward - greedy for reward in rewards]
    got = of().targets(groups)["advantages"]
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


MISTAKES = {**PLANTED, "the group's mean": lambda _, samples: samples.rewards - samples.rewards.mean()}


@pytest.mark.parametrize("wrong", MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_is_caught(wrong):
    samples = samples_of([made_group("p", (1.0, 0.0), greedy=0.25), made_group("q", (2.0,), greedy=2.0)])

    def check(function):
        assert function(samples).tolist() == [0.75, -0.25, 0.0]

    assert caught(check, of().estimate, wrong)


def test_one_completion_is_enough_and_the_baseline_is_greedy():
    algorithm = of(group_size=1)
    assert (algorithm.baseline(), algorithm.check()) == ({"temperature": 0.0}, [])
    assert trial(algorithm)
