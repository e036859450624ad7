import pytest
import torch

from offbeat_engine import BatchError, train_batch


def tensors(**changes):
    base = {
        "input_ids": torch.zeros(2, 4, dtype=torch.int64),
        "lengths": torch.tensor([4, 3]),
        "loss_mask": torch.tensor([[False, False, True, True], [False, False, True, False]]),
    }
    return {**base, **changes}


def test_a_batch_that_follows_the_schema_is_taken():
    batch = train_batch(**tensors(advantages=torch.zeros(2, 4)))
    assert batch.batch_size == torch.Size([2])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": torch.tensor([5, 3])}, "`lengths` must lie in 1..4"),
        ({"lengths": torch.tensor([4.0, 3.0])}, "`lengths` must be"),
        ({"advantage": torch.zeros(2, 4)}, "unknown key `advantage`"),
        ({"advantages": torch.zeros(2, 3)}, "`advantages` must be"),
        ({"loss_mask": torch.ones(2, 4, dtype=torch.bool)}, "position 0 or in the padding"),
        ({"temperature": torch.tensor([1.0, 0.0])}, "`temperature` must be more than 0"),
        ({"temperature": torch.tensor([1.0, torch.nan])}, "`temperature` must be more than 0"),
    ],
)
def test_a_batch_that_breaks_it_is_refused_by_name(changes, words):
    with pytest.raises(BatchError, match=words):
        train_batch(**tensors(**changes))


@pytest.mark.parametrize(
    ("missing", "wanted"),
    [("lengths", r"`lengths` \[B\] torch.int64"), ("loss_mask", r"`loss_mask` \[B, T\] torch.bool")],
)
def test_a_missing_key_is_named_with_what_came(missing, wanted):
    given = tensors()
    del given[missing]
    others = ", ".join(sorted(given))
    with pytest.raises(BatchError, match=rf"{wanted} \(.*\), got {others}; make batches with"):
        train_batch(**given)
