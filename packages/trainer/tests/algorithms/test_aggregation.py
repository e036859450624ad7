import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_engine import LossScale
from offbeat_trainer.algorithms.policy_loss import aggregate
from offbeat_trainer.config import Aggregation

VALUES_BT = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 4.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK_BT = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
SCALE = LossScale(num_tokens=4, num_sequences=3)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (Aggregation.TOKEN_MEAN, (6 + 4) / 4),
        (Aggregation.SEQ_MEAN_TOKEN_SUM, (6 + 4 + 0) / 3),
        (Aggregation.SEQ_MEAN_TOKEN_MEAN, (6 / 3 + 4 / 1 + 0) / 3),
        (Aggregation.SEQ_MEAN_TOKEN_SUM_NORM, (6 + 4 + 0) / (3 * 8)),
    ],
)
def test_by_hand(kind, wanted):
    assert aggregate(kind, VALUES_BT, MASK_BT, SCALE, 8).item() == pytest.approx(wanted)


@pytest.mark.parametrize("kind", Aggregation)
@given(data=st.data())
def test_micro_batches_and_order_change_nothing(kind, data):
    num_sequences, num_tokens = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 6))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    values_BT = torch.randn(num_sequences, num_tokens, generator=random, dtype=torch.float64)
    mask_BT = torch.rand(num_sequences, num_tokens, generator=random) < 0.6
    scale = LossScale(num_tokens=int(mask_BT.sum()), num_sequences=num_sequences)
    whole = aggregate(kind, values_BT, mask_BT, scale, 5)
    order = torch.tensor(data.draw(st.permutations(range(num_sequences))))
    cuts = data.draw(st.lists(st.integers(0, num_sequences), max_size=4).map(sorted))
    parts = torch.tensor_split(order, cuts)  # some of them empty
    summed = sum(aggregate(kind, values_BT[part], mask_BT[part], scale, 5) for part in parts)
    torch.testing.assert_close(summed, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", Aggregation)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_outside_the_mask_does_not_matter(kind, poison):
    poisoned_BT = VALUES_BT.masked_fill(~MASK_BT, poison).requires_grad_()
    loss = aggregate(kind, poisoned_BT, MASK_BT, SCALE, 8)
    (grad_BT,) = torch.autograd.grad(loss, poisoned_BT)
    assert loss.item() == aggregate(kind, VALUES_BT, MASK_BT, SCALE, 8).item()
    assert grad_BT.isfinite().all()
    assert not grad_BT[~MASK_BT].any()
    assert grad_BT[MASK_BT].all()


@pytest.mark.parametrize("kind", Aggregation)
def test_nothing_to_train_on_is_zero(kind):
    nothing = LossScale(num_tokens=0, num_sequences=0)
    assert aggregate(kind, torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), nothing, 8).item() == 0
