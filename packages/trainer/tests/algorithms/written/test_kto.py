"""KTO beside its paper in float64 NumPy: the loss by its gradient, and the reference point by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from offbeat_engine.testing import make_tiny_model
from offbeat_trainer import Labelled
from offbeat_trainer.algorithms.written.config import KtoConfig
from offbeat_trainer.algorithms.written.kto import Kto, KtoLoss, mismatched, reference_point
from rows import call, counts, cuts, differences, learned, masked, padded, shape, tokens

CONFIG = KtoConfig(beta=0.7, desirable_weight=1.5, undesirable_weight=0.5)
KL = 0.3


def rows(count=7, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        Labelled(prompt_ids=(1, *tokens(draw, 4)), completion_ids=tokens(draw), desirable=index % 3 == 0)
        for index in range(count)
    ]


def case(seed=0):
    return masked(Kto(config=CONFIG).batch(rows(seed=seed)), seed)


def value(lead, desirable):
    """The value of equation 7 with lambda in front, below its own: what is lost, by sequence."""
    weight = CONFIG.desirable_weight if desirable else CONFIG.undesirable_weight
    gain = lead - KL if desirable else KL - lead
    return weight - weight / (1 + math.exp(-CONFIG.beta * gain))


def reference(batch, policy_BT):
    lead_B = np.where(batch["loss_mask"].numpy(), policy_BT - batch["ref_logprobs"].numpy(), 0.0).sum(1)
    return np.mean(
        [value(lead, one) for lead, one in zip(lead_B, batch["kto/desirable"].tolist(), strict=True)]
    )


LOSS = KtoLoss(config=CONFIG, kl=KL)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_that_of_the_paper_however_rows_are_cut_ordered_and_padded(seed):
    batch, policy_BT = case(seed)
    wanted, scale = reference(batch, policy_BT.numpy()), counts(batch)
    for parts in ([torch.arange(7)], *cuts(batch)):
        found = sum(float(call(LOSS, policy_BT[part], batch[part], scale).loss) for part in parts)
        assert found == pytest.approx(wanted, abs=1e-9)
    wide, more_BT = padded(batch, policy_BT)
    assert float(call(LOSS, more_BT, wide).loss) == pytest.approx(wanted, abs=1e-9)


def test_the_gradient_is_that_of_differences():
    batch, policy_BT = case()
    leaf_BT = policy_BT.clone().requires_grad_()
    call(LOSS, leaf_BT, batch).loss.backward()
    assert torch.allclose(leaf_BT.grad, differences(lambda at: reference(batch, at), policy_BT), atol=1e-8)
    desirable_B = batch["kto/desirable"]
    assert leaf_BT.grad[desirable_B].max() <= 0 <= leaf_BT.grad[~desirable_B].min()


def test_a_wrong_sign_a_shift_and_a_wrong_count_or_point_are_seen():
    batch, policy_BT = case()
    right = reference(batch, policy_BT.numpy())
    turned = batch.clone()
    turned["kto/desirable"] = ~batch["kto/desirable"]
    wrong = {
        "labels": call(LOSS, policy_BT, turned),
        "shift": call(LOSS, policy_BT.roll(1, 1), batch),
        "count": call(LOSS, policy_BT, batch, replace(counts(batch), num_sequences=counts(batch).num_tokens)),
        "point": call(replace(LOSS, kl=-KL), policy_BT, batch),
    }
    for what, output in wrong.items():
        assert abs(float(output.loss) - right) > 1e-3, what


def test_a_prompt_meets_the_completion_of_the_next_row_and_the_last_one_that_of_the_first():
    written = rows()
    apart = mismatched(Kto(config=CONFIG).batch(written))
    for index, (ids, mask, length) in enumerate(
        zip(apart["input_ids"].tolist(), apart["loss_mask"].tolist(), apart["lengths"].tolist(), strict=True)
    ):
        following = written[(index + 1) % len(written)].completion_ids
        assert tuple(ids[:length]) == (*written[index].prompt_ids, *following)
        assert mask[:length] == [False] * len(written[index].prompt_ids) + [True] * len(following)


class Told:
    """A role whose log-probs are a constant, times the tokens' place in the vocabulary."""

    def __init__(self, factor):
        self.factor = factor

    def whole_logprobs(self, batch):
        return torch.where(batch["loss_mask"], self.factor * batch["input_ids"].float(), 0.0)


def test_the_reference_point_is_the_mean_lead_over_mismatched_rows_and_never_negative():
    written = rows()
    batch = Kto(config=CONFIG).batch(written)
    lead = sum(sum(row.completion_ids) for row in written) / len(written)  # each completion meets one prompt
    assert reference_point({"policy": Told(0.03), "reference": Told(0.01)}, batch) == pytest.approx(
        0.02 * lead, rel=1e-5
    )
    assert reference_point({"policy": Told(0.01), "reference": Told(0.03)}, batch) == 0


def test_two_weights_of_zero_are_refused():
    [refusal] = Kto(config=KtoConfig(desirable_weight=0.0, undesirable_weight=0.0)).check()
    assert refusal.setting == "algorithm.desirable_weight"


@pytest.mark.parametrize("updates", [1, 2])
def test_it_starts_at_half_the_weights_and_tells_rows_apart_at_the_end(tmp_path, updates):
    algorithm = Kto(config=KtoConfig(beta=0.5), step=shape(updates))
    batch = algorithm.batch(rows(8))
    (before, first, *_, after), _ = learned(algorithm, make_tiny_model(tmp_path), batch, steps=12)
    assert before["validation/loss"] == pytest.approx(0.5, abs=1e-5)
    assert first["kto/kl_nats"] == pytest.approx(0, abs=1e-3 if updates == 1 else 1)
    assert after["validation/loss"] < 0.35
    assert after["accuracy/validation"] == 1
