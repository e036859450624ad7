"""Log-probabilities and entropy from a head that is cut by vocabulary, against the same head in one piece."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from offbeat_engine.toolkit.step import logprobs as head_logprobs
from offbeat_engine.toolkit.step.logprobs import VocabShard

NUM_TOKENS, HIDDEN, VOCAB = 13, 8, 31
CUTS = (0, 19, VOCAB)  # parts of two sizes, and so chunks of two sizes


def naive(hidden, head, targets, temperature):
    logits = head(hidden) if temperature is None else head(hidden) / temperature[:, None]
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def piece(head, first, end):
    """Return rows `first` to `end` of `head` as a layer of their own."""
    mine = torch.nn.Linear(head.in_features, end - first, bias=head.bias is not None)
    for own, whole in zip(mine.parameters(), head.parameters(), strict=True):
        own.data.copy_(whole.data[first:end])
    return mine


def gradients(values, weights, leaves):
    loss = sum((w * x).sum() for w, x in zip(weights, values, strict=False) if x.requires_grad)
    return list(torch.autograd.grad(loss, leaves))


def compare(rank, bias, entropy_gradient, trained, tempered):
    """Hold one shard to the whole: values, and gradients of what is `trained`."""
    torch.manual_seed(1)
    first, end = CUTS[rank : rank + 2]
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=bias)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, requires_grad=trained != "head")
    targets = torch.randint(0, VOCAB, (NUM_TOKENS,))
    temperature = 0.3 + torch.rand(NUM_TOKENS) if tempered else None
    weights = torch.randn(2, NUM_TOKENS)
    mine, shard = piece(head, first, end), VocabShard(first, dist.group.WORLD)  # last: it draws, too
    for one in (head, mine):
        one.requires_grad_(trained != "hidden")

    got = head_logprobs.token_logprobs(hidden, mine, targets, temperature, entropy_gradient, shard)
    logprobs, entropy = naive(hidden, head, targets, temperature)
    assert_close(got, (logprobs, entropy), rtol=0, atol=1e-5)
    assert got[1].requires_grad is entropy_gradient
    leaves = [tensor for tensor in (hidden, *mine.parameters()) if tensor.requires_grad]
    found = gradients(got, weights, leaves)
    leaves = [tensor for tensor in (hidden, *head.parameters()) if tensor.requires_grad]
    expected = gradients((logprobs, entropy if entropy_gradient else entropy.detach()), weights, leaves)
    if hidden.requires_grad:
        assert (found[0] - expected[0]).abs().max() > 1e-2, "a part of the rows has a part of the gradient"
        dist.all_reduce(found[0])
    expected = [whole if whole.shape == hidden.shape else whole[first:end] for whole in expected]
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def all_ways(world, keep_elements):
    head_logprobs._KEEP_ELEMENTS = keep_elements
    head_logprobs._CHUNK_ELEMENTS = {"cpu": 5 * VOCAB}
    for way in itertools.product((False, True), (False, True), ("both", "hidden", "head"), (False, True)):
        compare(world.rank, *way)


@pytest.mark.parametrize("keep_elements", [0, 1 << 24], ids=["recomputed", "kept"])
def test_values_and_gradients_of_shards_are_those_of_the_whole_head(two_ranks, keep_elements):
    two_ranks.run(all_ways, keep_elements)


def digits(world):
    """Two shards whose logits are far apart, at a real vocabulary, against float64; one token all but impossible."""
    torch.manual_seed(2)
    vocab, cut = 151_936, 100_000
    head = torch.nn.Linear(16, vocab)
    head.weight.data.normal_(std=0.75)
    head.bias.data[:cut] = -40.0
    hidden, targets = torch.randn(6, 16), torch.randint(0, vocab, (6,))
    head.bias.data[targets[0]] = -300.0
    first, end = ((0, cut), (cut, vocab))[world.rank]
    shard = VocabShard(first, dist.group.WORLD)
    got = head_logprobs.token_logprobs(hidden, piece(head, first, end), targets, None, False, shard)
    exact = head(hidden).double().log_softmax(-1)
    assert_close(got[0].double(), exact.gather(1, targets[:, None]).squeeze(1), rtol=1e-7, atol=1e-5)
    assert_close(got[1].double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=3e-6)


def test_shards_far_apart_keep_their_digits(two_ranks):
    two_ranks.run(digits)
