"""Who has which tokens of a row, and what they look at there: against what a mask over the whole row says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_engine.megatron.families import Among
from offbeat_engine.megatron.layers.context import _works, cut, dealt, filled_up
from offbeat_engine.toolkit.hf.layouts import Layout

CPU = torch.device("cpu")
RANKS = st.sampled_from([2, 3, 4])
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=5)


@given(LENGTHS, RANKS)
def test_every_token_is_dealt_once_and_all_ranks_have_as_many_of_each_sequence(lengths, size):
    filled = [filled_up(length, size) for length in lengths]
    assert all(length <= full < length + 2 * size for length, full in zip(lengths, filled, strict=True))
    order_Ps = dealt(tuple(filled), size)
    assert order_Ps.flatten().sort().values.tolist() == list(range(sum(filled)))
    owner = torch.repeat_interleave(torch.tensor(filled))
    for tokens_s in order_Ps:
        assert (owner[tokens_s].bincount() * size).tolist() == filled


def test_a_rank_has_a_chunk_from_the_front_and_one_from_the_back():
    assert dealt((8, 4), 2).tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


@given(LENGTHS, RANKS, st.sampled_from([None, 1, 3, 7]))
def test_a_token_sees_what_is_before_it_in_its_sequence_and_in_its_window(lengths, size, window):
    filled = tuple(filled_up(length, size) for length in lengths)
    row = torch.arange(sum(filled))
    of = torch.repeat_interleave(torch.tensor(filled))
    seen = (of[:, None] == of) & (row[:, None] >= row)
    if window is not None:
        seen &= row[:, None] - row < window
    order_Ps, found = dealt(filled, size), torch.zeros_like(seen)
    everywhere = order_Ps.flatten()
    pairs = []
    for rank in range(size):
        for work in _works(filled, (rank, size), window, CPU):
            num_queries, num_keys = work.query_Nq.shape[1], work.key_NL.shape[1]
            causal = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
            mask = causal if work.seen_qL is None else work.seen_qL
            for query_q, key_L in zip(work.query_Nq, work.key_NL, strict=True):
                found[order_Ps[rank][query_q][:, None], everywhere[key_L]] |= mask
        pairs.append(int(found[order_Ps[rank]].sum()))
    assert torch.equal(found, seen)
    if window is None:
        assert len(set(pairs)) == 1  # all have the same to do


@pytest.mark.parametrize("rank", [0, 1])
def test_answers_are_those_of_a_ranks_own_tokens_and_their_places_those_of_all(rank):
    layout = Layout(
        model_inputs={"lengths": torch.tensor([8, 4])},
        select_M=torch.tensor([1, 2, 7, 9]),
        targets_M=torch.tensor([10, 20, 70, 90]),
        temperature_M=torch.tensor([1.0, 2.0, 7.0, 9.0]),
        place_M=torch.tensor([100, 200, 700, 900]),
        dummy=False,
    )
    mine = cut(layout, Among(rank, 2))
    assert mine.counts_P == (2, 2)
    assert mine.place_M.tolist() == [100, 700, 200, 900]
    assert mine.targets_M.tolist() == ([10, 70], [20, 90])[rank]
    assert mine.temperature_M is not None
    assert mine.temperature_M.tolist() == ([1.0, 7.0], [2.0, 9.0])[rank]
    assert mine.select_M.tolist() == ([1, 3], [0, 4])[rank]
