"""CISPO, SAPO, DPPO and DRO against loops over tokens."""

from math import exp, log

import numpy as np
import pytest
import torch

from offbeat_trainer.algorithms.policy.configs import (
    CispoConfig,
    CispoScale,
    Divergence,
    DppoConfig,
    DroConfig,
    SapoConfig,
)
from offbeat_trainer.algorithms.policy.token_level import Cispo, Dppo, Dro, Sapo
from offbeat_trainer.algorithms.policy_loss import Tokens
from policy_checks import STEP, check_all, check_class, draw

ARRAYS = [draw(seed, spread=1.0, per_sequence=seed < 2) for seed in range(4)]


def cispo(new, fixed, old, advantages, mask, config):
    total = 0.0
    for place in map(tuple, np.argwhere(mask)):
        ratio = exp(fixed[place] - old[place])
        if config.scale == "absolute":
            weight = min(ratio, config.ratio_cap)
        else:
            weight = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        total -= weight * advantages[place] * new[place]
    return total / mask.sum()


def sapo(new, fixed, old, advantages, mask, config):
    total = 0.0
    for b in range(len(mask)):
        for t in np.flatnonzero(mask[b]):
            tau = config.temperature_positive if advantages[b, t] > 0 else config.temperature_negative
            ratio = exp(new[b, t] - old[b, t])
            gate = 4 / tau / (1 + exp(-tau * (ratio - 1)))
            total -= gate * advantages[b, t] / mask[b].sum()
    return total / len(mask)


def dppo(new, fixed, old, advantages, mask, config):
    total = 0.0
    for place in map(tuple, np.argwhere(mask)):
        p, q, advantage = exp(fixed[place]), exp(old[place]), advantages[place]
        far = abs(p - q) if config.divergence == "tv" else q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))
        outward = (advantage > 0 and p > q and far > config.clip_high) or (
            advantage < 0 and p < q and far > config.clip_low
        )
        if not outward:
            total -= min(p / q, config.ratio_cap) * advantage * new[place]
    return total / mask.sum()


def dro(new, fixed, old, advantages, mask, config):
    total = 0.0
    for place in map(tuple, np.argwhere(mask)):
        total -= advantages[place] * new[place] - config.beta / 2 * (new[place] - old[place]) ** 2
    return total / mask.sum()


TV, KL = Divergence.TV, Divergence.KL
CASES = [
    (Cispo, cispo, CispoConfig(ratio_cap=1.5), {"ratio_cap": 1.6, "scale": CispoScale.RELATIVE}),
    (
        Cispo,
        cispo,
        CispoConfig(scale=CispoScale.RELATIVE, clip_low=0.3),
        {"clip_low": 0.4, "clip_high": 0.25, "scale": CispoScale.ABSOLUTE},
    ),
    (Sapo, sapo, SapoConfig(), {"temperature_positive": 1.05, "temperature_negative": 1.0}),
    (
        Dppo,
        dppo,
        DppoConfig(clip_low=0.1, clip_high=0.15, ratio_cap=2.0),
        {"clip_low": 0.2, "clip_high": 0.25, "ratio_cap": 1.9, "divergence": KL},
    ),
    (
        Dppo,
        dppo,
        DppoConfig(divergence=KL, clip_low=0.02, clip_high=0.03, ratio_cap=2.0),
        {"clip_low": 0.1, "clip_high": 0.15, "ratio_cap": 1.9, "divergence": TV},
    ),
    (Dro, dro, DroConfig(), {"beta": 0.06}),
]


@pytest.mark.parametrize(("kind", "reference", "config", "moved"), CASES)
def test_value_gradient_invariances_and_planted_errors(kind, reference, config, moved):
    check_all(kind(config=config), reference, ARRAYS, moved)


@pytest.mark.parametrize("kind", [Cispo, Sapo, Dppo, Dro])
def test_it_has_a_page_and_passes_the_trial(kind):
    check_class(kind)


def test_the_divergence_of_certain_tokens_is_finite():
    sure = torch.zeros(1, 2, dtype=torch.float32)
    tokens = Tokens(logprobs=sure, old_logprobs=sure - STEP, mask=torch.ones(1, 2, dtype=torch.bool))
    found = Dppo.formula(torch.ones(1, 2), torch.ones(1, 2), tokens, DppoConfig(divergence=KL))
    assert not found.clipped_high.any()
