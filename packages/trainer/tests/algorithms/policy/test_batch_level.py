"""Clip-Cov, KL-Cov and M2PO: what they choose over the whole batch, and the loss of what was chosen, in plain Python."""

import struct
from math import exp

import numpy as np
import pytest
import torch

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_trainer import Role, StepShape
from offbeat_trainer.algorithms.policy.batch_level import ClipCov, KlCov, M2po
from offbeat_trainer.algorithms.policy.configs import ClipCovConfig, KlCovConfig, M2poConfig
from offbeat_trainer.data.metrics import reduce_metrics
from offbeat_trainer.errors import TrainerError
from policy_checks import B, batch_of, check_all, check_class, draw, scale_of

ARRAYS = [draw(seed, spread=0.5, per_sequence=seed < 2) for seed in range(4)]


def places_of(mask):
    return [*map(tuple, np.argwhere(mask))]


def covariances(new, advantages, mask):
    mean_a, mean_p = advantages[mask].sum() / mask.sum(), new[mask].sum() / mask.sum()
    return {place: (advantages[place] - mean_a) * (new[place] - mean_p) for place in places_of(mask)}


def lot(logprob):
    return struct.unpack("<i", struct.pack("<f", logprob))[0] * 2654435761 % 2**32


def clip_cov(new, fixed, old, advantages, mask, config):
    found = covariances(fixed, advantages, mask)
    near = [place for place, value in found.items() if config.covariance_low < value < config.covariance_high]
    near.sort(key=lambda place: lot(old[place]), reverse=True)
    left_out = near[: max(int(config.fraction * mask.sum()), 1)]
    total = 0.0
    for place in places_of(mask):
        ratio, advantage = exp(new[place] - old[place]), advantages[place]
        kept = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        total -= 0.0 if place in left_out else min(ratio * advantage, kept * advantage)
    return total / mask.sum()


def kl_cov(new, fixed, old, advantages, mask, config):
    found = covariances(fixed, advantages, mask)
    held = sorted(found, key=found.__getitem__)[-max(int(config.fraction * mask.sum()), 1) :]
    total = 0.0
    for place in places_of(mask):
        total -= exp(new[place] - old[place]) * advantages[place]
        total += config.penalty * abs(new[place] - old[place]) if place in held else 0.0
    return total / mask.sum()


def m2po(new, fixed, old, advantages, mask, config):
    outward = {
        place: (fixed[place] - old[place]) ** 2
        for place in places_of(mask)
        if advantages[place] * (fixed[place] - old[place]) > 0
    }
    while outward and sum(outward.values()) / len(outward) > config.threshold:
        outward.pop(max(outward, key=outward.__getitem__))
    total = 0.0
    for place in places_of(mask):
        if place in outward or advantages[place] * (fixed[place] - old[place]) <= 0:
            total -= exp(new[place] - old[place]) * advantages[place]
    return total / mask.sum()


CASES = [
    (
        ClipCov,
        clip_cov,
        ClipCovConfig(fraction=0.15, covariance_low=0.1, covariance_high=0.6),
        {"fraction": 0.3, "covariance_low": 0.0, "covariance_high": 0.3, "clip_low": 0.3, "clip_high": 0.3},
    ),
    (KlCov, kl_cov, KlCovConfig(fraction=0.2), {"fraction": 0.3, "penalty": 0.9}),
    (M2po, m2po, M2poConfig(), {"threshold": 0.1}),
]


@pytest.mark.parametrize(("kind", "reference", "config", "moved"), CASES)
def test_value_gradient_invariances_and_planted_errors(kind, reference, config, moved):
    check_all(kind(config=config), reference, ARRAYS, moved)


@pytest.mark.parametrize("kind", [ClipCov, KlCov, M2po])
def test_it_has_a_page_and_passes_the_trial(kind):
    check_class(kind)


@pytest.mark.parametrize("kind", [ClipCov, KlCov, M2po])
def test_a_loss_without_a_choice_is_refused(kind):
    algorithm = kind(config=kind.Config())
    predictions, batch = batch_of(algorithm, ARRAYS[0])
    with pytest.raises(TrainerError, match="train by `learn`"):
        algorithm.loss_fn()(predictions, batch.exclude("policy/chosen"), scale_of(ARRAYS[0]))


def test_at_least_one_token_is_chosen_and_none_where_none_can_be():
    algorithm = ClipCov(config=ClipCovConfig(covariance_low=0.1, covariance_high=0.6))
    assert batch_of(algorithm, ARRAYS[0])[1]["policy/chosen"].sum() == 1
    nothing = ClipCov(config=ClipCovConfig(covariance_low=1e9, covariance_high=2e9))
    assert not batch_of(nothing, ARRAYS[0])[1]["policy/chosen"].any()


def learned(algorithm, path, budget):
    """Return the metrics of one step on a real engine."""
    batch, noise = random_batch(B), torch.Generator().manual_seed(0)
    mask = batch["loss_mask"]
    batch["advantages"] = torch.randn(mask.shape, generator=noise) * mask
    batch["rollout_logprobs"] = (
        torch.randn(mask.shape, generator=noise) / 2 - 4
    ) * mask  # about that of one in 64
    settings = Fsdp2Config(
        model=ModelConfig(path=path), optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=budget
    )
    engine = engine_class("fsdp2")(settings, World())
    engine.init_model()
    metrics = algorithm.learn({"policy": Role(engine)}, batch)
    engine.close()
    return reduce_metrics([one for one in metrics if one.key.startswith(("policy/", "train/"))])


@pytest.mark.parametrize(("kind", "config"), [case[::2] for case in CASES])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_real_engine_learns_the_same_of_any_micro_batches(kind, config, updates, tmp_path):
    path = make_tiny_model(tmp_path / "tiny")
    algorithm = kind(config=config, step=StepShape(updates_per_step=updates))
    small, large = (learned(algorithm, path, budget) for budget in (16, 4096))
    assert small.pop("train/micro_batches") > large.pop("train/micro_batches")
    assert 0 < large["policy/masked_fraction"] < 1
    assert small == pytest.approx(large, rel=1e-4, abs=1e-6)
