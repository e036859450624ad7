"""GSPO, LUSPO, GMPO, VESPO and OPSM against loops over sequences, as their papers write them."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest
import torch

from offbeat_trainer.algorithms.policy.configs import (
    GmpoConfig,
    GspoConfig,
    LuspoConfig,
    OpsmConfig,
    VespoConfig,
)
from offbeat_trainer.algorithms.policy.sequence_level import Gmpo, Gspo, Luspo, Opsm, Vespo
from policy_checks import caught, check_all, check_class, draw, with_formula

ARRAYS = [draw(seed, spread=0.5) for seed in range(4)]


def clipped(ratio, advantage, config):
    near = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    return -min(ratio * advantage, near * advantage)


def sequences(mask):
    """Yield each sequence that has tokens, and their places."""
    return ((b, np.flatnonzero(mask[b])) for b in range(len(mask)) if mask[b].any())


def gspo(new, fixed, old, advantages, mask, config):
    total = 0.0
    for b, places in sequences(mask):
        ratio = exp(sum(new[b, t] - old[b, t] for t in places) / len(places))
        total += clipped(ratio, advantages[b, 0], config)
    return total / len(mask)


def luspo(new, fixed, old, advantages, mask, config):
    total = 0.0
    for b, places in sequences(mask):
        ratio = exp(sum(new[b, t] - old[b, t] for t in places) / len(places))
        total += len(places) * clipped(ratio, advantages[b, 0], config)
    return total / len(mask)


def gmpo(new, fixed, old, advantages, mask, config):
    """(Product of |min(rho A, clip(rho) A)| / |A|)^(1/length), with the sign of A, so that the smaller gain counts."""
    total = 0.0
    for b, places in sequences(mask):
        sign, product = np.sign(advantages[b, 0]), 1.0
        for t in places:
            ratio = exp(new[b, t] - old[b, t])
            near = min(max(ratio, exp(-config.clip_low)), exp(config.clip_high))
            product *= abs(min(sign * ratio, sign * near))
        total -= advantages[b, 0] * product ** (1 / len(places))
    return total / len(mask)


def vespo(new, fixed, old, advantages, mask, config):
    total = 0.0
    for b, places in sequences(mask):
        advantage, product = advantages[b, 0], 1.0
        for t in places:
            product *= exp(fixed[b, t]) / exp(old[b, t])
        k, decay = (
            (config.k_positive, config.lambda_positive)
            if advantage >= 0
            else (config.k_negative, config.lambda_negative)
        )
        weight = exp(decay) * product**k * exp(-decay * product)
        total -= weight * advantage * sum(new[b, t] for t in places)
    return total / mask.sum()


def opsm(new, fixed, old, advantages, mask, config):
    total = 0.0
    for b, places in sequences(mask):
        drift = sum(old[b, t] - fixed[b, t] for t in places) / len(places)
        if advantages[b, 0] < 0 and drift > config.threshold:
            continue
        total += sum(clipped(exp(new[b, t] - old[b, t]), advantages[b, t], config) for t in places)
    return total / mask.sum()


BOUNDS = {"clip_low": 0.1, "clip_high": 0.12}
CASES = [
    (Gspo, gspo, GspoConfig(**BOUNDS), {"clip_low": 0.2, "clip_high": 0.2}),
    (Luspo, luspo, LuspoConfig(**BOUNDS), {"clip_low": 0.2, "clip_high": 0.2}),
    (Gmpo, gmpo, GmpoConfig(clip_high=0.3), {"clip_low": 0.5, "clip_high": 0.4}),
    (
        Vespo,
        vespo,
        VespoConfig(),
        {"k_positive": 2.1, "k_negative": 2.9, "lambda_positive": 2.9, "lambda_negative": 2.1},
    ),
    (Opsm, opsm, OpsmConfig(threshold=0.02), {"threshold": 0.5, "clip_low": 0.3, "clip_high": 0.4}),
]


@pytest.mark.parametrize(("kind", "reference", "config", "moved"), CASES)
def test_value_gradient_invariances_and_planted_errors(kind, reference, config, moved):
    check_all(kind(config=config), reference, ARRAYS, moved)


@pytest.mark.parametrize(
    ("kind", "reference", "config"), [case[:3] for case in CASES if case[0] is not Vespo]
)
def test_a_mean_over_the_row_instead_of_the_tokens_of_a_sequence_is_seen(kind, reference, config):
    def padded(ratio, advantages, tokens, settings):
        return kind.formula(ratio, advantages, replace(tokens, mask=torch.ones_like(tokens.mask)), settings)

    assert caught(with_formula(kind(config=config), padded), reference, ARRAYS, config)


@pytest.mark.parametrize("kind", [Gspo, Luspo, Gmpo, Vespo, Opsm])
def test_it_has_a_page_and_passes_the_trial(kind):
    check_class(kind)
