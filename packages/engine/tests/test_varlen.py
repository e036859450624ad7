"""Variable-length attention: a prefix attended to once and merged is attention, in forward and backward."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from offbeat_engine import ConfigError
from offbeat_engine.fsdp2.attention.packed import packed_attention, plan_padded
from offbeat_engine.fsdp2.attention.packing import RowInputs
from offbeat_engine.fsdp2.attention.varlen import plan_varlen

CPU = torch.device("cpu")


def batch_of(rows):
    width = max(1, *map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return ids, torch.arange(width)[None] < torch.tensor([len(row) for row in rows])[:, None]


def attend(plan, heads, window=None, dropout=0.0, scaling=None):
    """Return output [N, A, D] of `heads`, each [1, A, N, D]."""
    options = {"packed": plan, "sliding_window": window, "dropout": dropout, "scaling": scaling}
    return packed_attention(torch.nn.Identity(), *heads, None, **options)[0][0]


def by_sequence(rows, where, heads, window, scaling):
    """Attention of every sequence by itself, as the formula has it, of the tokens that the row holds."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in heads)
    repeats = query.shape[1] // key.shape[1]
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    for row, places in zip(rows, where, strict=True):
        place = places[: len(row)]
        q, k, v = query[place], *(each[place].repeat_interleave(repeats, 1) for each in (key, value))
        scores = torch.einsum("qad,mad->aqm", q, k) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        age = torch.arange(len(row))[:, None] - torch.arange(len(row))
        seen = (age >= 0) & (age < (len(row) + 1 if window is None else window))
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        # Sequences that begin alike say the same of what they share: which of them writes it does not matter.
        out = out.index_copy(0, place, torch.einsum("aqm,mad->qad", probs, v))
    return out


def heads_of(num_tokens, num_query=4, num_kv=2, size=8, value_size=8, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((num_query, size), (num_kv, size), (num_kv, value_size))
    return tuple(
        torch.randn(1, heads, num_tokens, width, generator=draw, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads, width in shapes
    )


def check(rows, plan_rows, share, window, tolerance=1e-10, scaling=None, **shape):
    rows = [row for row in rows if row]
    inputs, where = RowInputs(plan_rows, share=share)(*batch_of(rows), CPU)
    num_tokens = inputs["input_ids"].shape[1]
    heads = heads_of(num_tokens, **shape)
    got = attend(inputs["packed"], heads, window, scaling=scaling)
    expected = by_sequence(rows, where, heads, window, scaling)
    assert_close(got, expected, rtol=0, atol=tolerance)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads, wanted = (torch.autograd.grad((each * weights).sum(), heads) for each in (got, expected))
    for one, other in zip(grads, wanted, strict=True):
        assert_close(one, other, rtol=0, atol=tolerance)
    return inputs["packed"]


# Few tokens, so that many begin alike, some are wholly shared and some are equal.
ROWS = st.lists(st.lists(st.integers(1, 2), max_size=9), min_size=1, max_size=8).filter(any)


@given(ROWS, st.booleans(), st.sampled_from([None, 1, 2, 5]))
def test_output_and_gradients_are_those_of_each_sequence_by_itself(rows, share, window):
    check(rows, plan_varlen, share, window)


GROUP = [[7, 8, 9, *tail] for tail in ([1, 2], [1, 3, 4], [5], [6, 6, 6, 6], [])]


@pytest.mark.parametrize("plan_rows", [plan_varlen, plan_padded])
@pytest.mark.parametrize("window", [None, 2, 4, 50])
def test_both_plans_come_to_the_same_for_a_group_of_completions(plan_rows, window):
    plan = check([*GROUP, [3, 1, 2]], plan_rows, True, window, scaling=0.2, size=6, value_size=10)
    assert plan.num_tokens < sum(map(len, GROUP)) + 3


def test_completions_of_one_prompt_ask_for_it_in_one_segment():
    plan = RowInputs(plan_varlen, share=True)(*batch_of(GROUP), CPU)[0]["packed"]
    own, prefixes = plan.parts(None)
    assert own.ends_q.tolist() == [
        0,
        2,
        4,
        5,
        9,
        12,
    ]  # the last sequence is the prompt alone, and holds it for all
    assert own.queries_Q is None
    assert own.keys_M is None
    # The second begins like the first for one token more than the others do, so it asks for that by itself.
    assert sorted(prefixes.ends_q.diff().tolist()) == [2, 2 + 1 + 4]
    assert sorted(prefixes.ends_k.diff().tolist()) == [3, 4]
    assert not prefixes.causal


def test_scores_far_apart_do_not_overflow_where_parts_are_merged():
    rows = [[7, 7, 7, 1, 2], [7, 7, 7, 3, 4]]
    inputs, where = RowInputs(plan_varlen, share=True)(*batch_of(rows), CPU)
    query, key, value = (each.detach().float() for each in heads_of(7))
    key[0, :, :3] *= 200  # the prefix's scores are in the thousands: one part has all of the weight
    got = attend(inputs["packed"], (query, key, value))
    assert bool(got.isfinite().all())
    assert_close(got, by_sequence(rows, where, (query, key, value), None, None), rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
@pytest.mark.parametrize("plan_rows", [plan_varlen, plan_padded])
def test_in_bf16_keys_that_many_share_keep_their_gradient(plan_rows, device):
    """A GPU adds rows up in their own dtype: 64 shares of a gradient, rounded one by one, lose its second digit."""
    rows = [[7, 8, 9, 10, 11, 12 + index] for index in range(64)]
    inputs, where = RowInputs(plan_rows, share=True)(*batch_of(rows), torch.device(device))
    heads = heads_of(inputs["input_ids"].shape[1], num_query=4, num_kv=2, size=16, value_size=16)
    halves = tuple(each.detach().to(device, torch.bfloat16).requires_grad_() for each in heads)
    exact = tuple(each.detach().cpu().double().requires_grad_() for each in halves)
    # All pull the same way, as the completions of a prompt that was answered right do.
    attend(inputs["packed"], halves).float().sum().backward()
    by_sequence(rows, where, exact, None, None).sum().backward()
    got, wanted = (each[2].grad[0, :, :5].cpu().double() for each in (halves, exact))
    assert float(wanted.min()) > 2.0
    assert (
        float(((got - wanted) / wanted).abs().max()) <= 2**-7
    )  # a rounding of each share, and one of their sum


def test_dropout_is_refused_and_named():
    plan = RowInputs(plan_varlen)(*batch_of(GROUP), CPU)[0]["packed"]
    with pytest.raises(ConfigError, match=r"varlen attention knows no dropout.*0\.1"):
        attend(plan, heads_of(plan.num_tokens), dropout=0.1)
