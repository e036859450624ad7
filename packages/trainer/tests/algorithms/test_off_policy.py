"""Corrections for off-policy tokens, against plain Python and against what importance sampling promises."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from offbeat_engine import LossScale, train_batch
from offbeat_trainer.algorithms.grpo import Grpo
from offbeat_trainer.algorithms.policy_loss import (
    PolicyLoss,
    correct,
    ess_fraction,
    importance_ratios,
    mask_above,
    mask_outside,
    truncate,
)
from offbeat_trainer.config import Correction, CorrectionLevel, GrpoConfig, Proximal
from offbeat_trainer.errors import PlanRefused, TrainerError

B, T = 4, 7
LOW, HIGH = 0.8, 1.25


def some_batch(seed=0, spread=0.8, **more):
    random = torch.Generator().manual_seed(seed)
    logprobs_BT = -torch.rand(B, T, generator=random) - 0.2
    lengths_B = torch.tensor([7, 4, 6, 2])  # the last has no completion
    position_T = torch.arange(T)
    batch = train_batch(
        input_ids=torch.zeros(B, T, dtype=torch.int64),
        lengths=lengths_B,
        loss_mask=(position_T >= 2) & (position_T < lengths_B[:, None]),
        advantages=torch.randn(B, T, generator=random),
        rollout_logprobs=logprobs_BT + spread * torch.randn(B, T, generator=random),
        **more,
    )
    predictions = TensorDict({"logprobs": logprobs_BT.requires_grad_()}, batch_size=[B])
    return predictions, batch, LossScale(num_tokens=int(batch["loss_mask"].sum()), num_sequences=B)


def plain_ratio(level, trainer_BT, sampler_BT, mask_BT, b, t):
    row = [(trainer_BT[b, u] - sampler_BT[b, u]).item() for u in range(T) if mask_BT[b, u]]
    return math.exp(
        {
            CorrectionLevel.TOKEN: (trainer_BT[b, t] - sampler_BT[b, t]).item(),
            CorrectionLevel.SEQUENCE: sum(row),
            CorrectionLevel.GEOMETRIC: sum(row) / len(row),
        }[level]
    )


def plain_weight(kind, ratio):
    return {
        Correction.NONE: 1.0,
        Correction.TRUNCATE: min(ratio, HIGH),
        Correction.MASK: ratio if ratio <= HIGH else 0.0,
        Correction.ICEPOP: ratio if LOW <= ratio <= HIGH else 0.0,
    }[kind]


@pytest.mark.parametrize("level", CorrectionLevel)
@pytest.mark.parametrize("kind", Correction)
def test_loss_gradient_and_metrics_against_plain_python(kind, level):
    config = GrpoConfig(correction=kind, correction_level=level, correction_low=LOW, correction_high=HIGH)
    predictions, batch, scale = some_batch()
    output = PolicyLoss(config=config, max_completion_tokens=5)(predictions, batch, scale)
    (grad_BT,) = torch.autograd.grad(output.loss, predictions["logprobs"])
    mask_BT, trainer_BT = batch["loss_mask"], predictions["logprobs"].detach()
    ratios = {
        (b, t): plain_ratio(level, trainer_BT, batch["rollout_logprobs"], mask_BT, b, t)
        for b in range(B)
        for t in range(T)
        if mask_BT[b, t]
    }
    n = len(ratios)
    for (b, t), ratio in ratios.items():
        wanted = -batch["advantages"][b, t].item() * plain_weight(kind, ratio) / n
        assert grad_BT[b, t].item() == pytest.approx(wanted, rel=1e-4, abs=1e-7)
    assert not grad_BT[~mask_BT].any()
    cut = sum(plain_weight(kind, r) != pytest.approx(r) for r in ratios.values()) / n
    truncating = kind is Correction.TRUNCATE
    assert output.sums["offpolicy/truncated_fraction"].item() == pytest.approx(cut if truncating else 0.0)
    masking = kind in (Correction.MASK, Correction.ICEPOP)
    assert output.sums["offpolicy/masked_fraction"].item() == pytest.approx(cut if masking else 0.0)
    assert output.sums["offpolicy/ratio_mean"].item() == pytest.approx(sum(ratios.values()) / n, rel=1e-5)
    square = sum(r**2 for r in ratios.values()) / n
    assert output.sums["offpolicy/ratio_square_mean"].item() == pytest.approx(square, rel=1e-5)
    assert output.maxes["offpolicy/ratio_max"].item() == pytest.approx(max(ratios.values()), rel=1e-5)


def test_the_cases_above_are_not_empty():
    _, batch, _ = some_batch()
    predictions, _, _ = some_batch()
    for level in CorrectionLevel:
        ratio = importance_ratios(
            level, predictions["logprobs"].detach(), batch["rollout_logprobs"], batch["loss_mask"]
        )[batch["loss_mask"]]
        assert 0 < (ratio > HIGH).sum() < len(ratio)
        assert (ratio < LOW).any()


def test_bounds_belong_to_what_they_bound():
    ratio = torch.tensor([0.5, 2.0])
    assert not truncate(ratio, 2.0).truncated.any()
    assert not mask_above(ratio, 2.0).masked.any()
    assert not mask_outside(ratio, 0.5, 2.0).masked.any()


@pytest.mark.parametrize("kind", Correction)
def test_tokens_of_the_policy_itself_weigh_one(kind):
    weights = correct(kind, torch.ones(3), 0.5, 2.0)
    assert weights.weight.tolist() == [1, 1, 1]
    assert not (weights.truncated | weights.masked).any()


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20))
def test_effective_sample_size(ratios):
    ess = ess_fraction(sum(ratios) / len(ratios), sum(r * r for r in ratios) / len(ratios))
    assert 1 / len(ratios) - 1e-9 <= ess <= 1 + 1e-9
    assert math.isnan(ess_fraction(0.0, 0.0))


def test_the_effective_sample_size_of_a_step_comes_from_its_whole_means():
    sums = {"offpolicy/ratio_mean": 1.0, "offpolicy/ratio_square_mean": 2.0}
    assert PolicyLoss.derived(sums) == {"offpolicy/ess_fraction": 0.5}
    assert PolicyLoss.derived({"policy/entropy_nats": 1.0}) == {}


def test_exact_weights_give_the_gradient_of_the_policy_itself():
    """Sampled from q, weighed by p / q, the expected policy gradient is that of samples from p. Exact sums over V."""
    p = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 2.0], dtype=torch.float64)
    weights = correct(Correction.TRUNCATE, p / q, 0.5, high=100.0).weight
    torch.testing.assert_close((q * weights * advantages).sum(), (p * advantages).sum())
    assert ((q * correct(Correction.NONE, p / q, 0.5, 2.0).weight * advantages).sum()) != (
        p * advantages
    ).sum()
    biased = (q * correct(Correction.TRUNCATE, p / q, 0.5, 2.0).weight * advantages).sum()
    assert abs(biased - (p * advantages).sum()) < abs((q * advantages).sum() - (p * advantages).sum())


def test_the_proximal_policy_clips_and_the_sampler_weighs():
    """Decoupled: with old log-probs at the current policy, nothing is clipped however far the sampler is."""
    predictions, batch, scale = some_batch(spread=2.0)
    batch["old_logprobs"] = predictions["logprobs"].detach().clone()
    output = PolicyLoss(config=GrpoConfig(), max_completion_tokens=5)(predictions, batch, scale)
    assert (
        output.sums["policy/clip_low_fraction"].item() == output.sums["policy/clip_high_fraction"].item() == 0
    )
    assert output.sums["offpolicy/truncated_fraction"].item() > 0
    bypass = replace(GrpoConfig(), proximal=Proximal.ROLLOUT)
    output = PolicyLoss(config=bypass, max_completion_tokens=5)(predictions, batch, scale)
    assert (
        output.sums["policy/clip_low_fraction"].item() + output.sums["policy/clip_high_fraction"].item() > 0
    )


def test_the_bypass_is_ppo_against_the_sampler():
    predictions, batch, scale = some_batch()
    config = GrpoConfig(proximal=Proximal.ROLLOUT, correction=Correction.ICEPOP)
    loss = PolicyLoss(config=config, max_completion_tokens=5)
    got = loss(predictions, batch, scale)
    as_old = batch.clone()
    as_old["old_logprobs"] = as_old["rollout_logprobs"]
    plain = PolicyLoss(config=GrpoConfig(correction=Correction.NONE), max_completion_tokens=5)
    torch.testing.assert_close(got.loss, plain(predictions, as_old, scale).loss)
    assert not Grpo(config=config).needs_old_logprobs
    assert Grpo(config=plain.config).needs_old_logprobs
    del batch["rollout_logprobs"]
    with pytest.raises(TrainerError, match="rollout_logprobs"):
        loss(predictions, batch, scale)


def test_ratios_beyond_float32_and_values_outside_the_mask_do_no_harm():
    predictions, batch, scale = some_batch()
    outside = ~batch["loss_mask"]
    batch["rollout_logprobs"][outside] = float("nan")
    batch["rollout_logprobs"][0, 3] = -1e4
    for level in CorrectionLevel:
        config = GrpoConfig(correction_level=level)
        output = PolicyLoss(config=config, max_completion_tokens=5)(predictions, batch, scale)
        assert output.loss.isfinite()
        assert all(total.isfinite() for total in (*output.sums.values(), *output.maxes.values()))


@pytest.mark.parametrize(
    ("name", "value"), [("correction_low", 0.0), ("correction_low", 1.1), ("correction_high", 0.9)]
)
def test_bounds_that_make_no_sense_are_refused(name, value):
    with pytest.raises(PlanRefused, match=name):
        PolicyLoss(config=replace(GrpoConfig(), **{name: value}), max_completion_tokens=5)
