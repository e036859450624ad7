"""Exact expectations over a vocabulary of four tokens stand in for the slow reference."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from offbeat_engine import LossScale
from offbeat_engine.testing import random_batch
from offbeat_trainer import Grpo, GrpoConfig, PolicyLoss, TrainerError
from offbeat_trainer.algorithms.policy_loss import k1, k2, k3, kl_estimate
from offbeat_trainer.config import Advantage, KlEstimator, KlIn

LOGITS_V = torch.tensor([0.3, -0.5, 1.1, 0.0], dtype=torch.float64)
REF_LOGPROBS_V = torch.tensor([0.9, 0.2, 0.1, -0.4], dtype=torch.float64).log_softmax(-1)


def kl(first_V, second_V):
    return (first_V.exp() * (first_V - second_V)).sum()


def expectation(kind):
    """Return E over tokens of the estimate, and the expected gradient in the logits with the tokens held fixed."""
    logits_V = LOGITS_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(-1)
    loss = (logprobs_V.exp().detach() * kl_estimate(kind, logprobs_V, REF_LOGPROBS_V)).sum()
    return loss.detach(), torch.autograd.grad(loss, logits_V)[0]


def gradient_of(divergence):
    logits_V = LOGITS_V.clone().requires_grad_()
    return torch.autograd.grad(divergence(logits_V.log_softmax(-1)), logits_V)[0]


@pytest.mark.parametrize(
    ("kind", "estimate"), [(KlEstimator.K1, k1), (KlEstimator.K2, k2), (KlEstimator.K3, k3)]
)
def test_by_hand(kind, estimate):
    # Policy 1/2, reference 1/4: log ratio -ln 2.
    log_ratio = torch.tensor(-math.log(2.0), dtype=torch.float64)
    wanted = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)}[kind]
    assert estimate(log_ratio).item() == pytest.approx(wanted, abs=1e-12)
    got = kl_estimate(kind, torch.tensor(0.5).double().log(), torch.tensor(0.25).double().log())
    assert got.item() == pytest.approx(wanted, abs=1e-12)


def test_k1_and_k3_are_unbiased_and_k2_is_close():
    exact = kl(LOGITS_V.log_softmax(-1), REF_LOGPROBS_V)
    torch.testing.assert_close(expectation(KlEstimator.K1)[0], exact)
    torch.testing.assert_close(expectation(KlEstimator.K3)[0], exact)
    assert expectation(KlEstimator.K2)[0].item() == pytest.approx(exact.item(), rel=0.2)


def test_as_losses_they_pull_in_three_ways():
    torch.testing.assert_close(expectation(KlEstimator.K1)[1], torch.zeros_like(LOGITS_V))
    torch.testing.assert_close(
        expectation(KlEstimator.K2)[1], gradient_of(lambda logprobs_V: kl(logprobs_V, REF_LOGPROBS_V))
    )
    torch.testing.assert_close(
        expectation(KlEstimator.K3)[1], gradient_of(lambda logprobs_V: kl(REF_LOGPROBS_V, logprobs_V))
    )


def test_k3_plus_has_the_value_of_k3_and_pulls_as_k2_does():
    torch.testing.assert_close(expectation(KlEstimator.K3_PLUS)[0], expectation(KlEstimator.K3)[0])
    torch.testing.assert_close(expectation(KlEstimator.K3_PLUS)[1], expectation(KlEstimator.K2)[1])


def test_abs_is_the_distance_of_the_logs_and_pulls_by_its_sign_alone():
    apart_V = LOGITS_V.log_softmax(-1) - REF_LOGPROBS_V
    torch.testing.assert_close(
        kl_estimate(KlEstimator.ABS, LOGITS_V.log_softmax(-1), REF_LOGPROBS_V), apart_V.abs()
    )
    leaf_V = LOGITS_V.log_softmax(-1).requires_grad_()
    (gradient_V,) = torch.autograd.grad(kl_estimate(KlEstimator.ABS, leaf_V, REF_LOGPROBS_V).sum(), leaf_V)
    assert torch.equal(gradient_V, apart_V.sign())


def test_k3_keeps_its_digits_near_zero_and_stays_finite_far_away():
    tiny = torch.tensor(1e-4, dtype=torch.float32)
    assert k3(tiny).item() == pytest.approx(math.expm1(1e-4) - 1e-4, rel=1e-3)
    assert k3(torch.tensor([1e4, -1e4, 90.0])).isfinite().all()


FULL = GrpoConfig(kl_coef=0.5, kl_estimator=KlEstimator.FULL)


def full_loss(batch, logits_BTV, ref_BTV, rows, num_tokens):
    """Return the loss of `rows` where nothing else pulls, and the KL that is measured."""
    logprobs_BTV = logits_BTV.log_softmax(-1)
    batch = batch.copy()
    batch["reference/top"] = ref_BTV
    batch["advantages"] = torch.zeros(batch["loss_mask"].shape, dtype=torch.float64)
    predictions = TensorDict(
        {"logprobs": logprobs_BTV[..., 0].detach(), "top_logprobs": logprobs_BTV}, batch_size=[len(batch)]
    )
    scale = LossScale(num_tokens=num_tokens, num_sequences=len(batch))
    output = PolicyLoss(config=FULL, max_completion_tokens=5)(predictions[rows], batch[rows], scale)
    return output.loss, output.sums["policy/ref_kl_nats"]


def test_full_is_the_kl_of_whole_distributions_whatever_the_micro_batches():
    batch = random_batch(4, seed=0)
    batch["loss_mask"][1] = False
    draw, shape = torch.Generator().manual_seed(0), (*batch["loss_mask"].shape, 7)
    logits, ref = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    ref = ref.log_softmax(-1)
    num_tokens = int(batch["loss_mask"].sum())
    parts = [full_loss(batch, logits, ref, rows, num_tokens) for rows in ([0, 1], [2, 3])]
    p, q = logits.detach().softmax(-1).numpy(), ref.exp().numpy()
    kl_BT = (p * np.log(p / q)).sum(-1) * batch["loss_mask"].numpy()
    wanted = kl_BT.sum() / num_tokens
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(0.5 * wanted, abs=1e-12)
    assert sum(measured.item() for _, measured in parts) == pytest.approx(wanted, rel=1e-6)
    (gradient,) = torch.autograd.grad(sum(loss for loss, _ in parts), logits)
    exact = p * (np.log(p / q) - kl_BT[..., None]) * batch["loss_mask"].numpy()[..., None]
    np.testing.assert_allclose(gradient.numpy(), 0.5 * exact / num_tokens, atol=1e-12)


def test_full_asks_both_models_for_whole_distributions_and_is_of_no_token_alone():
    assert all(role.names_tokens for role in Grpo(config=FULL).roles().values())
    with pytest.raises(TrainerError, match="no estimate from one token"):
        kl_estimate(KlEstimator.FULL, LOGITS_V, REF_LOGPROBS_V)
    for told in ({"kl_in": KlIn.REWARD}, {"advantage": Advantage.OTB}):
        settings = [one.setting for one in Grpo(config=replace(FULL, **told)).check()]
        assert settings == ["algorithm.kl_estimator"]
