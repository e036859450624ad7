import pytest
import torch
from torch.testing import assert_close

from offbeat_engine.testing import relative_error
from offbeat_engine.toolkit.step import logprobs as head_logprobs

NUM_TOKENS, HIDDEN, VOCAB = 13, 8, 31


def naive(hidden, head, targets, temperature):
    logprobs = (head(hidden) / temperature[:, None]).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("keep_elements", [0, 1 << 24], ids=["recomputed", "kept"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("trained", ["both", "hidden", "head"])
@pytest.mark.parametrize("tempered", [False, True])
def test_chunked_values_and_gradients_are_those_of_whole_logits(
    monkeypatch, keep_elements, bias, entropy_gradient, trained, tempered
):
    monkeypatch.setattr(head_logprobs, "_KEEP_ELEMENTS", keep_elements)
    monkeypatch.setattr(head_logprobs, "_CHUNK_ELEMENTS", {"cpu": 5 * VOCAB})
    torch.manual_seed(1)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=bias)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, requires_grad=True)
    targets = torch.randint(0, VOCAB, (NUM_TOKENS,))
    temperature = 0.3 + torch.rand(NUM_TOKENS) if tempered else None
    weights = torch.randn(2, NUM_TOKENS)
    hidden.requires_grad_(trained != "head")
    head.requires_grad_(trained != "hidden")
    leaves = [tensor for tensor in (hidden, *head.parameters()) if tensor.requires_grad]

    got = head_logprobs.token_logprobs(hidden, head, targets, temperature, entropy_gradient)
    expected = naive(hidden, head, targets, torch.ones(NUM_TOKENS) if temperature is None else temperature)
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


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (3.0, 0.0), (1.0, 20.0), (8.0, -40.0)])
def test_at_a_real_vocabulary_entropy_keeps_its_digits(scale, offset):
    torch.manual_seed(2)
    vocab = 151_936
    head = torch.nn.Linear(16, vocab)
    head.weight.data.normal_(std=scale / 4)
    head.bias.data.fill_(offset)
    hidden, targets = torch.randn(6, 16), torch.randint(0, vocab, (6,))
    got = head_logprobs.token_logprobs(hidden, head, targets, None, False)
    # The same float32 logits, then float64: the products of the layer itself are not in question.
    exact = head(hidden).double().log_softmax(-1)
    assert_close(got[0].double(), exact.gather(1, targets[:, None]).squeeze(1), rtol=0, atol=1e-5)
    assert_close(got[1].double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=3e-6)


def test_an_impossible_token_leaves_entropy_finite():
    head = torch.nn.Linear(1, 3, bias=False)
    head.weight.data = torch.tensor([[0.0], [0.0], [-300.0]])
    targets = torch.tensor([0])
    logprobs, entropy = head_logprobs.token_logprobs(torch.ones(1, 1), head, targets, None, True)
    assert_close(logprobs, -torch.log(torch.tensor([2.0])))
    assert_close(entropy, torch.log(torch.tensor([2.0])))
    entropy.sum().backward()
    assert bool(head.weight.grad.isfinite().all())


@pytest.mark.parametrize("trained", ["both", "hidden"])
def test_in_bf16_a_confident_tokens_small_gradient_is_not_lost(monkeypatch, trained):
    monkeypatch.setattr(head_logprobs, "_CHUNK_ELEMENTS", {"cpu": 5 * VOCAB})
    torch.manual_seed(1)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.bfloat16).requires_grad_(trained == "both")
    exact = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    exact.weight.data.copy_(head.weight.data)
    rows = exact.weight.detach()[:NUM_TOKENS]
    hidden = (12 * rows / rows.square().sum(1, keepdim=True)).bfloat16().requires_grad_()
    hidden32 = hidden.detach().float().requires_grad_()
    targets = torch.arange(NUM_TOKENS)

    got, _ = head_logprobs.token_logprobs(hidden, head, targets, None, False)
    expected, _ = naive(hidden32, exact, targets, torch.ones(NUM_TOKENS))
    assert float(expected.detach().max()) > -0.01
    got.sum().backward()
    expected.sum().backward()
    for row in range(NUM_TOKENS):
        assert relative_error(hidden.grad[row], hidden32.grad[row]) <= 0.1
    if trained == "both":
        assert relative_error(head.weight.grad, exact.weight.grad) <= 0.1


def peak_bytes(run):
    """Return the most bytes that `run` had allocated at a time, from every allocation and release on the way."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as prof:
        run()
    held = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("entropy_gradient", [pytest.param(False, marks=pytest.mark.deep), True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_large_vocabulary_never_stands_in_memory_whole(entropy_gradient, frozen):
    num_tokens, vocab = 2048, 32_000
    hidden = torch.randn(num_tokens, 64, requires_grad=True)
    head = torch.nn.Linear(64, vocab, bias=False).requires_grad_(not frozen)
    targets = torch.randint(0, vocab, (num_tokens,))

    def step(function):
        logprobs, entropy = function()
        (logprobs.sum() + (entropy.sum() if entropy_gradient else 0.0)).backward()

    chunked = peak_bytes(
        lambda: step(lambda: head_logprobs.token_logprobs(hidden, head, targets, None, entropy_gradient))
    )
    plain = peak_bytes(lambda: step(lambda: naive(hidden, head, targets, torch.ones(num_tokens))))
    assert plain > 2 * num_tokens * vocab * 4
    assert chunked <= 0.2 * plain


def test_a_frozen_head_gets_no_gradient_and_backward_no_logits(monkeypatch):
    hidden = torch.randn(NUM_TOKENS, HIDDEN, requires_grad=True)
    head = torch.nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
    logprobs, _ = head_logprobs.token_logprobs(
        hidden, head, torch.zeros(NUM_TOKENS, dtype=torch.int64), None, False
    )
    monkeypatch.delattr(head_logprobs._Head, "logits")
    logprobs.sum().backward()
    assert head.weight.grad is None
    assert hidden.grad.abs().max() > 0
