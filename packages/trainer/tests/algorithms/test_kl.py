"""Exact expectations over a vocabulary of four tokens stand in for the slow reference."""

import math

import pytest
import torch

from offbeat_trainer.algorithms.policy_loss import k1, k2, k3, kl_estimate
from offbeat_trainer.config import KlEstimator

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
