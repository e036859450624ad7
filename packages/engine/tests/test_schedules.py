import math

import pytest

from offbeat_engine import OptimizerConfig, Schedule, learning_rate


def rates(**settings):
    config = OptimizerConfig(lr=2.0, warmup_steps=4, total_steps=10, **settings)
    return [learning_rate(config, step) for step in range(13)]


WARM = [0.5, 1.0, 1.5, 2.0]


def test_constant():
    assert rates() == WARM + [2.0] * 9


def test_linear_reaches_its_floor_at_the_last_step_and_stays():
    expected = WARM + [2.0 - 1.5 * k / 6 for k in range(7)] + [0.5, 0.5]
    assert rates(schedule=Schedule.LINEAR, min_lr_ratio=0.25) == pytest.approx(expected)


def test_cosine():
    expected = WARM + [1.0 + math.cos(math.pi * k / 6) for k in range(7)] + [0.0, 0.0]
    assert rates(schedule=Schedule.COSINE) == pytest.approx(expected, abs=1e-12)


def test_no_warm_up_starts_at_the_full_rate():
    assert learning_rate(OptimizerConfig(lr=3.0, schedule=Schedule.LINEAR, total_steps=6), 0) == 3.0
