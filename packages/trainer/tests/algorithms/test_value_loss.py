"""The value loss and GAE against loops in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_engine import LossScale, train_batch
from offbeat_trainer.algorithms.ppo import ValueLoss, gae
from offbeat_trainer.algorithms.roles import explained_variance
from offbeat_trainer.errors import PlanRefused, TrainerError


def slow_gae(rewards, values, discount, trace):
    """One row, every token chosen by the policy: the double sum of the paper's equation 16."""
    ahead = [*values, 0.0][1:]
    deltas = [r + discount * w - v for r, v, w in zip(rewards, values, ahead, strict=True)]
    return [
        sum((discount * trace) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))
    ]


numbers = st.floats(-3, 3, width=32)


@given(
    st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=1, max_size=9),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    st.sampled_from([0.0, 0.9, 1.0]),
)
def test_gae_is_the_double_sum_over_the_chosen_tokens(tokens, discount, trace):
    rewards, values, chosen = (list(column) for column in zip(*tokens, strict=True))
    got, returns = gae(
        torch.tensor([rewards]),
        torch.tensor([values]),
        torch.tensor([chosen]),
        discount=discount,
        trace=trace,
    )
    picked = [t for t, here in enumerate(chosen) if here]
    expected = slow_gae([rewards[t] for t in picked], [values[t] for t in picked], discount, trace)
    assert got[0, picked].tolist() == pytest.approx(expected, abs=1e-5)
    assert returns[0, picked].tolist() == pytest.approx(
        [a + values[t] for a, t in zip(expected, picked, strict=True)], abs=1e-5
    )
    assert not got[~torch.tensor([chosen])].any()
    assert not returns[~torch.tensor([chosen])].any()


def test_gae_ignores_what_stands_outside_the_mask_even_nan():
    mask = torch.tensor([[False, True, True]])
    advantages, returns = gae(
        torch.tensor([[math.nan, 0.0, 1.0]]), torch.tensor([[math.inf, 0.5, 0.5]]), mask, discount=1, trace=1
    )
    assert advantages.tolist() == [[0.0, 0.5, 0.5]]
    assert returns.tolist() == [[0.0, 1.0, 1.0]]


@pytest.mark.parametrize("name", ["discount", "trace"])
def test_gae_refuses_what_is_no_share(name):
    with pytest.raises(PlanRefused, match=rf"`{name}` of GAE must be in 0\.\.1, got 1\.5"):
        gae(
            torch.zeros(1, 1),
            torch.zeros(1, 1),
            torch.ones(1, 1).bool(),
            **{"discount": 1, "trace": 1, name: 1.5},
        )


def batch_of(**extra):
    return train_batch(
        input_ids=torch.zeros(2, 4, dtype=torch.int64),
        lengths=torch.tensor([4, 3]),
        loss_mask=torch.tensor([[False, False, True, True], [False, True, True, False]]),
        **extra,
    )


def test_value_loss_against_a_loop():
    torch.manual_seed(0)
    returns, old, now = (torch.randn(2, 4) for _ in range(3))
    batch = batch_of(returns=returns, values=old)
    mask = batch["loss_mask"]
    now.requires_grad_()
    output = ValueLoss(clip=0.3)({"values": now}, batch, LossScale(num_tokens=4, num_sequences=2))
    total, clipped = 0.0, 0
    for b, t in mask.nonzero().tolist():
        v, v_old, target = float(now.detach()[b, t]), float(old[b, t]), float(returns[b, t])
        plain, near = (v - target) ** 2, (min(max(v, v_old - 0.3), v_old + 0.3) - target) ** 2
        total += 0.5 * max(plain, near) / 4
        clipped += near > plain
    assert float(output.loss.detach()) == pytest.approx(total, rel=1e-6)
    assert float(output.sums["value/clip_fraction"]) == pytest.approx(clipped / 4)
    output.loss.backward()
    assert not now.grad[~mask].any()
    assert now.grad[mask].any()


def test_outside_the_clip_a_value_on_its_way_to_the_return_stops():
    batch = batch_of(returns=torch.full((2, 4), 5.0), values=torch.zeros(2, 4))
    now = torch.full((2, 4), 1.0, requires_grad=True)  # moved by 1 towards the return, more than the clip
    ValueLoss(clip=0.2)({"values": now}, batch, LossScale(num_tokens=4, num_sequences=2)).loss.backward()
    assert not now.grad.any()
    ValueLoss(clip=0)({"values": now}, batch, LossScale(num_tokens=4, num_sequences=2)).loss.backward()
    assert now.grad[batch["loss_mask"]].tolist() == pytest.approx([-1.0] * 4)


def test_value_loss_says_what_is_missing():
    scale = LossScale(num_tokens=1, num_sequences=1)
    with pytest.raises(TrainerError, match='head: "value"'):
        ValueLoss()({"logprobs": torch.zeros(2, 4)}, batch_of(), scale)
    with pytest.raises(TrainerError, match="`returns`"):
        ValueLoss()({"values": torch.zeros(2, 4)}, batch_of(), scale)
    with pytest.raises(TrainerError, match="`values`"):
        ValueLoss()({"values": torch.zeros(2, 4)}, batch_of(returns=torch.zeros(2, 4)), scale)
    with pytest.raises(PlanRefused, match="`clip` of a value loss"):
        ValueLoss(clip=-1)


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 4.0])
    values = torch.tensor([1.5, 2.0, 3.0])
    expected = 1 - float((returns - values).square().mean()) / float(returns.var(correction=0))
    moments = (
        float((returns - values).square().mean()),
        float(returns.mean()),
        float(returns.square().mean()),
    )
    assert explained_variance(*moments) == pytest.approx(expected, rel=1e-5)
    assert math.isnan(explained_variance(1.0, 2.0, 4.0))


def test_what_was_not_clipped_does_not_count_as_clipped():
    """`old + (value - old)` differs from the value by rounding, and its error may be the larger one."""
    draw = torch.Generator().manual_seed(0)
    values, old, returns = (0.05 * torch.randn(8, 64, generator=draw) for _ in range(3))
    mask = torch.ones(8, 64, dtype=torch.bool)
    mask[:, 0] = False
    batch = train_batch(
        input_ids=torch.zeros(8, 64, dtype=torch.int64),
        lengths=torch.full((8,), 64),
        loss_mask=mask,
        values=old,
        returns=returns,
    )
    scale = LossScale(num_tokens=int(mask.sum()), num_sequences=8)
    near = (values - old).abs()[mask]
    quiet = ValueLoss(clip=float(near.max()) + 0.01)({"values": values}, batch, scale)
    assert quiet.sums["value/clip_fraction"] == 0
    half = ValueLoss(clip=float(near.median()))({"values": values}, batch, scale)
    assert 0 < half.sums["value/clip_fraction"] < 0.5
