import pytest
import torch
from torch.testing import assert_close

from offbeat_engine.fsdp2 import heads

NUM_TOKENS, HIDDEN, VOCAB = 13, 8, 31


def naive(hidden, head, targets, temperature):
    logprobs = (head(hidden) / temperature[:, None]).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("keep_elements", [0, 1 << 24], ids=["recomputed", "kept"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunked_values_and_gradients_are_those_of_whole_logits(
    monkeypatch, keep_elements, bias, entropy_gradient
):
    monkeypatch.setattr(heads, "_KEEP_ELEMENTS", keep_elements)
    monkeypatch.setattr(heads, "_CHUNK_ELEMENTS", {"cpu": 5 * VOCAB})
    torch.manual_seed(1)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=bias)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, requires_grad=True)
    targets = torch.randint(0, VOCAB, (NUM_TOKENS,))
    temperature = 0.3 + torch.rand(NUM_TOKENS)
    weights = torch.randn(2, NUM_TOKENS)
    leaves = [hidden, *head.parameters()]

    got = heads.token_logprobs(hidden, head, targets, temperature, entropy_gradient)
    expected = naive(hidden, head, targets, temperature)
    assert_close(got, expected, rtol=0, atol=1e-5)
    assert got[1].requires_grad is entropy_gradient
    used = 2 if entropy_gradient else 1
    for pair in zip(
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights[:used], got, strict=False)), leaves),
        torch.autograd.grad(
            sum((w * x).sum() for w, x in zip(weights[:used], expected, strict=False)), leaves
        ),
        strict=True,
    ):
        assert_close(*pair, rtol=1e-4, atol=1e-5)


def test_an_impossible_token_leaves_entropy_finite():
    head = torch.nn.Linear(1, 3, bias=False)
    head.weight.data = torch.tensor([[0.0], [0.0], [-300.0]])
    targets = torch.tensor([0])
    logprobs, entropy = heads.token_logprobs(torch.ones(1, 1), head, targets, None, True)
    assert_close(logprobs, -torch.log(torch.tensor([2.0])))
    assert_close(entropy, torch.log(torch.tensor([2.0])))
    entropy.sum().backward()
    assert bool(head.weight.grad.isfinite().all())
