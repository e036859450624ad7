"""The losses of pairs beside their papers in float64 NumPy, their gradients beside differences, and errors that must not go unnoticed."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from offbeat_engine.testing import make_tiny_model
from offbeat_trainer import Dpo, DpoConfig
from offbeat_trainer.algorithms.written.config import CpoConfig, DpoVariant, OrpoConfig, SimpoConfig
from offbeat_trainer.algorithms.written.pairs import SMOOTHED, Cpo, Orpo, Simpo, assemble_pairs
from rows import call, counts, cuts, differences, learned, masked, padded, pairs


def s(x):
    return 1 / (1 + math.exp(-x))


def dpo(beta, e):
    """Return each loss of a pair by its log-ratios c and r, sums or (`*_norm`, ipo) means, written from the papers."""
    t = 1 / (2 * beta)
    return {
        "sigmoid": lambda c, r: (1 - e) * math.log1p(math.exp(beta * (r - c))) + e * math.log1p(math.exp(beta * (c - r))),
        "sigmoid_norm": lambda c, r: (1 - e) * math.log1p(math.exp(beta * (r - c))) + e * math.log1p(math.exp(beta * (c - r))),
        "hinge": lambda c, r: max(0.0, 1 - beta * (c - r)),
        "ipo": lambda c, r: (c - r - t) ** 2,
        "robust": lambda c, r: ((1 - e) * -math.log(s(beta * (c - r))) - e * -math.log(s(beta * (r - c)))) / (1 - 2 * e),
        "exo": lambda c, r: sum(q * math.log(q / p) for q, p in ((s(beta * (c - r)), 1 - e), (s(beta * (r - c)), e))),
        "nca": lambda c, r: -math.log(s(beta * c)) - 0.5 * math.log(s(-beta * c)) - 0.5 * math.log(s(-beta * r)),
        "bco": lambda c, r: -math.log(s(beta * c)) - math.log(1 - s(beta * r)),
        "sppo": lambda c, r: (c - t) ** 2 + (r + t) ** 2,
        "apo_zero": lambda c, r: (1 - s(beta * c)) + s(beta * r),
        "apo_down": lambda c, r: s(beta * c) + (1 - s(beta * (c - r))),
    }  # fmt: skip


def odds(z):
    return math.exp(z) / (1 - math.exp(z))


CASES = {
    **{
        name: (
            Dpo(config=DpoConfig(loss=DpoVariant(name), beta=0.7, label_smoothing=0.1 if name in SMOOTHED else 0.0)),
            function, name in ("ipo", "sigmoid_norm"), True, 0.0,
        )
        for name, function in dpo(0.7, 0.1).items()
    },
    "rpo": (Dpo(config=DpoConfig(beta=0.3, sft_coef=0.5)), dpo(0.3, 0.0)["sigmoid"], False, True, 0.5),
    "simpo": (
        Simpo(config=SimpoConfig(beta=2.0, gamma=0.6)),
        lambda c, r: math.log1p(math.exp(-(2.0 * c - 2.0 * r - 0.6))), True, False, 0.0,
    ),
    "orpo": (
        Orpo(config=OrpoConfig(odds_coef=0.3)),
        lambda c, r: -0.3 * math.log(odds(c) / (odds(c) + odds(r))), True, False, 1.0,
    ),
    "cpo": (Cpo(config=CpoConfig(beta=0.2)), lambda c, r: -math.log(s(0.2 * (c - r))), False, False, 1.0),
}  # fmt: skip


def reference(name, batch, policy_BT):
    """Return the loss of rows 2i (chosen) and 2i + 1 (rejected), a mean over pairs."""
    _, function, per_token, referenced, sft_coef = CASES[name]
    mask = batch["loss_mask"].numpy()
    policy, ref = np.where(mask, policy_BT, 0.0), np.where(mask, batch["ref_logprobs"].numpy(), 0.0)
    score = (policy - ref if referenced else policy).sum(1)
    num = np.maximum(mask.sum(1), 1)
    score = score / num if per_token else score
    losses = [
        function(score[2 * i], score[2 * i + 1]) - sft_coef * policy[2 * i].sum() / num[2 * i]
        for i in range(len(mask) // 2)
    ]
    return sum(losses) / len(losses)


def case(name, seed=0):
    batch, policy_BT = masked(assemble_pairs(pairs(5, seed)), seed)
    if name == "orpo":  # an empty completion is certain, and its odds are infinite
        for row in (~batch["loss_mask"].any(1)).nonzero()[:, 0].tolist():
            batch["loss_mask"][row, int(batch["lengths"][row]) - 1] = True
    return CASES[name][0].loss_fn(), batch, policy_BT


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_that_of_the_paper_however_pairs_are_cut_ordered_and_padded(name, seed):
    loss_fn, batch, policy_BT = case(name, seed)
    wanted, scale = reference(name, batch, policy_BT.numpy()), counts(batch)
    for parts in ([torch.arange(10)], *cuts(batch)):
        found = sum(float(call(loss_fn, policy_BT[part], batch[part], scale).loss) for part in parts)
        assert found == pytest.approx(wanted, abs=1e-9)
    wide, more_BT = padded(batch, policy_BT)
    assert float(call(loss_fn, more_BT, wide).loss) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_that_of_differences_and_zero_outside_the_mask(name):
    loss_fn, batch, policy_BT = case(name)
    leaf_BT = policy_BT.clone().requires_grad_()
    call(loss_fn, leaf_BT, batch).loss.backward()
    assert torch.allclose(
        leaf_BT.grad, differences(lambda at: reference(name, batch, at), policy_BT), atol=1e-7
    )
    assert not leaf_BT.grad[~batch["loss_mask"]].any()


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_sign_a_shift_and_a_wrong_normaliser_are_seen(name):
    loss_fn, batch, policy_BT = case(name)
    right = reference(name, batch, policy_BT.numpy())
    swapped = batch.clone()
    swapped["dpo/chosen"] = ~batch["dpo/chosen"]
    wrong = {
        "sign": call(loss_fn, policy_BT, swapped),
        "shift": call(loss_fn, policy_BT.roll(1, 1), batch),
        "rows for pairs": call(loss_fn, policy_BT, batch, replace(counts(batch), num_units=10)),
        "tokens": call(replace(loss_fn, per_token=not loss_fn.per_token), policy_BT, batch)
        if name != "orpo"
        else call(replace(loss_fn, sft_coef=0.0), policy_BT, batch),
    }
    for what, output in wrong.items():
        assert abs(float(output.loss) - right) > 1e-3, what


@pytest.mark.parametrize(
    "name", ["sigmoid", "robust", "exo", "sigmoid_norm", "hinge", "apo_zero", "apo_down", "bco", "ipo"]
)
def test_a_policy_that_is_the_reference_has_the_loss_that_the_formula_has_at_zero(name):
    _, batch, _ = case(name)
    at_zero = {"apo_zero": 1, "apo_down": 1, "hinge": 1, "bco": 2 * math.log(2), "ipo": (1 / 1.4) ** 2}
    at_zero["exo"] = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    found = float(call(CASES[name][0].loss_fn(), batch["ref_logprobs"], batch).loss)
    assert found == pytest.approx(at_zero.get(name, math.log(2)), abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": DpoVariant.HINGE, "label_smoothing": 0.1}, "0.1, and the loss hinge has no use for it"),
        ({"loss": DpoVariant.EXO}, "exo divides by it"),
        ({"loss": DpoVariant.ROBUST, "label_smoothing": 0.5}, "robust divides by"),
    ],
)
def test_smoothing_that_a_loss_cannot_take_is_refused(settings, words):
    [refusal] = Dpo(config=DpoConfig(**settings)).check()
    assert (refusal.setting, words in refusal.reason) == ("algorithm.label_smoothing", True)
    assert refusal.remedy


def test_only_what_has_a_reference_in_its_formula_loads_one():
    assert {name: set(one.roles()) for name, (one, *_) in CASES.items()} == {
        name: {"policy", "reference"} if referenced else {"policy"}
        for name, (_, _, _, referenced, _) in CASES.items()
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_each_learns_which_completion_is_preferred(name, tiny):
    algorithm = CASES[name][0]
    (before, *steps, after), _ = learned(algorithm, tiny, algorithm.batch(pairs(5)), steps=16)
    assert steps[0]["train/loss"] == pytest.approx(before["validation/loss"], abs=1e-4)
    assert after["validation/loss"] < before["validation/loss"]
    assert after["accuracy/validation"] == 1
    assert after["validation/reward_margin"] > before["validation/reward_margin"]
