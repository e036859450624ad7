from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_rollout import SamplingParams
from offbeat_rollout.hf.decode import sample, sampling_table, truncate, uniform_stream

CPU = torch.device("cpu")


def naive_allowed(logits, top_k, top_p):
    """The set of tokens that may be drawn, one token at a time."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if top_k != -1:
        order = order[:top_k]
    probs = np.exp(np.array([logits[i] for i in order], dtype=np.float64) - max(logits))
    probs /= probs.sum()
    kept, mass = [], 0.0
    for i, p in zip(order, probs, strict=True):
        if mass >= top_p:
            break
        kept.append(i)
        mass += p
    return set(kept)


@given(
    st.integers(0, 2**32),
    st.integers(2, 40),
    st.sampled_from([-1, 1, 2, 5, 100]),
    st.sampled_from([0.05, 0.3, 0.9, 1.0]),
)
def test_truncation_keeps_what_the_definition_keeps(seed, vocab, top_k, top_p):
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p)
    table = sampling_table([params] * 4, vocab, CPU)
    kept = truncate(logits, table.top_k, table.top_p)
    for row in range(4):
        finite = {i for i in range(vocab) if kept[row, i] > -torch.inf}
        assert finite == naive_allowed(logits[row].tolist(), top_k, top_p)


def test_a_row_without_truncation_keeps_its_bits_beside_one_that_has_it():
    logits = torch.randn(3, 50)
    params = [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, top_k=3, top_p=0.5),
        SamplingParams(max_tokens=1),
    ]
    table = sampling_table(params, 50, CPU)
    kept = truncate(logits, table.top_k, table.top_p)
    assert torch.equal(kept[[0, 2]], logits[[0, 2]])
    assert (kept[1] > -torch.inf).sum() <= 3


def test_frequencies_are_the_distribution_and_log_probs_are_its_own():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    rows = 40_000
    params = SamplingParams(max_tokens=1, temperature=0.7, top_k=4)
    table = sampling_table([params] * rows, 5, CPU)
    uniform = torch.tensor(uniform_stream(7, rows), dtype=torch.float32)
    tokens, logprobs, _ = sample(logits.expand(rows, 5).clone(), table, uniform)
    expected = (
        (logits[0] / 0.7).masked_fill(torch.tensor([False, False, False, True, False]), -torch.inf).softmax(0)
    )
    frequency = torch.bincount(tokens, minlength=5) / rows
    assert frequency[3] == 0
    # Four standard deviations of a frequency of about a half: 4 * sqrt(0.25 / 40,000) = 0.01.
    assert (frequency - expected).abs().max() < 0.01
    torch.testing.assert_close(logprobs, expected.log()[tokens], atol=1e-6, rtol=0)


def test_greedy_takes_the_top_and_is_told_at_temperature_one():
    logits = torch.randn(6, 30)
    params = [
        SamplingParams(max_tokens=1, temperature=0.0, top_k=2, top_p=0.3),
        SamplingParams(max_tokens=1, temperature=2.0),
    ]
    table = sampling_table(params * 3, 30, CPU)
    tokens, logprobs, _ = sample(logits, table, torch.full((6,), 0.5))
    assert torch.equal(tokens[::2], logits[::2].argmax(-1))
    expected = logits[::2].log_softmax(-1).gather(1, tokens[::2, None])[:, 0]
    torch.testing.assert_close(logprobs[::2], expected)


@pytest.mark.parametrize("value", [0.0, 1.0 - 2.0**-23])
def test_the_ends_of_the_unit_interval_never_draw_an_impossible_token(value):
    logits = torch.randn(200, 1000) * 5
    table = sampling_table([SamplingParams(max_tokens=1, top_k=7)] * 200, 1000, CPU)
    tokens, logprobs, _ = sample(logits, table, torch.full((200,), value))
    assert tokens.max() < 1000
    assert torch.isfinite(logprobs).all()


def test_streams_belong_to_their_seed_and_grow_at_the_end():
    assert uniform_stream(5, 10) == uniform_stream(5, 100)[:10]
    assert uniform_stream(5, 10) != uniform_stream(6, 10)
    assert uniform_stream(-1, 4) == uniform_stream(2**128 - 1, 4)
    assert uniform_stream(None, 10) != uniform_stream(None, 10)
    assert max(uniform_stream(0, 100_000)) < 1.0
