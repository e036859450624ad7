"""Activations in host memory: the same gradients bit for bit, and nothing left on the device that could go."""

import gc
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, SftLoss, World
from offbeat_engine.fsdp2 import Fsdp2Engine, stepping
from offbeat_engine.fsdp2.memory import offload
from offbeat_engine.fsdp2.memory.offload import HostActivations
from offbeat_engine.testing import make_tiny_model, random_batch

CPU = torch.device("cpu")
BATCHES = [random_batch(7, seed=seed) for seed in range(2)]


def config_of(path, **changes):
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=0.5)
    base = Fsdp2Config(model=ModelConfig(path=path), optimizer=optimizer)
    return replace(base, **changes)


def run(world, config, all_wrapped=False, batches=BATCHES):
    engine = Fsdp2Engine(replace(config, reshard="always" if all_wrapped else "auto"), world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    seen = []
    with engine.train_mode():
        for batch in batches:
            engine.optimizer_zero_grad()
            predictions, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
            seen += [predictions["logprobs"], *(tensor.clone() for _, tensor in engine.named_gradients())]
            seen.append(torch.tensor([loss, engine.optimizer_step()]))
    return seen


def same(got, expected):
    assert len(got) == len(expected)
    return all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))


@pytest.fixture
def made(monkeypatch):
    """Every `HostActivations` that the engine makes."""
    instances = []

    class Counted(HostActivations):
        def __init__(self, device):
            super().__init__(device)
            instances.append(self)

    monkeypatch.setattr(stepping, "HostActivations", Counted)
    return instances


def sent_by(made):
    """Return the bytes sent by each call that sent some: forward alone, as the self-check goes, sends none."""
    return [kept.num_bytes for kept in made if kept.num_bytes]


@pytest.mark.parametrize(
    "changes",
    [{}, {"micro_batch_tokens": 20}, {"packing": False}, {"activation_checkpointing": True}],
    ids=str,
)
def test_one_rank_computes_the_same_bits(tiny, made, changes):
    expected = run(World(), config_of(tiny, **changes))
    assert not made
    got = run(World(), config_of(tiny, **changes, activation_offload=True))
    assert same(got, expected)
    assert len(sent_by(made)) == len(BATCHES)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_tokens": 20},
        {"sequence_parallel_size": 2, "activation_checkpointing": True},
        {"shard_size": 1, "offload_parameters": True, "offload_optimizer": True},
    ],
    ids=str,
)
def test_two_ranks_compute_the_same_bits(tiny, two_ranks, changes):
    expected = two_ranks.run(run, config_of(tiny, **changes), True)
    got = two_ranks.run(run, config_of(tiny, **changes, activation_offload=True), True)
    assert all(same(mine, other) for mine, other in zip(got, expected, strict=True))


def test_with_checkpointing_only_the_inputs_of_layers_travel(tiny, made):
    run(World(), config_of(tiny, activation_offload=True))
    run(World(), config_of(tiny, activation_offload=True, activation_checkpointing=True))
    sent = sent_by(made)
    assert sent[-1] * 3 < sent[0]


def test_what_is_saved_leaves_and_comes_back():
    weight = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
    start = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)

    def forward(hooks):
        hidden = start * 2
        outputs = [hidden @ weight.t(), hidden.sin(), (hidden.transpose(0, 1) * 3).exp()]
        return StorageWeakRef(hidden.untyped_storage()), sum(output.sum() for output in outputs)

    kept = HostActivations(CPU)
    with kept.kept():
        alive, total = forward(kept)
    assert alive.expired()
    # `hidden` once for the product and once for the sine together, the exponential's result, `start * 2` nothing,
    # and the weight not at all.
    assert kept.num_bytes == 2 * 5 * 8 * 8
    total.backward()
    got = start.grad, weight.grad
    start.grad = weight.grad = None
    alive, total = forward(None)
    assert not alive.expired()
    total.backward()
    assert same(got, (start.grad, weight.grad))


class Logged(HostActivations):
    """Remembers what was fetched and what was taken, by number of sending, and the most that lay ahead."""

    def __init__(self):
        super().__init__(CPU)
        self.sent, self.log, self.most_ahead = [], [], 0

    def _send(self, tensor, before):
        self.sent.append(super()._send(tensor, before))
        return self.sent[-1]

    def _fetch(self, kept):
        super()._fetch(kept)
        self.log.append(("fetch", self.sent.index(kept)))

    def _taken(self, kept):
        self.log.append(("take", self.sent.index(kept)))
        self.most_ahead = max(self.most_ahead, sum(each.ahead is not None for each in self.sent))
        return super()._taken(kept)


@pytest.mark.parametrize("ahead", [0, 1, 2, 100])
def test_what_backward_will_ask_for_comes_before_it_asks(monkeypatch, ahead):
    start = torch.randn(16, requires_grad=True)
    monkeypatch.setattr(offload, "_MAX_AHEAD_BYTES", ahead * 64)

    def forward():
        value = start * 1.0
        for _ in range(6):
            value = value.sin()
        return value.sum()

    kept = Logged()
    with kept.kept():
        total = forward()
    total.backward()
    got, start.grad = start.grad, None
    forward().backward()
    assert torch.equal(got, start.grad)
    order = list(reversed(range(6)))
    assert [number for what, number in kept.log if what == "take"] == order
    assert [number for what, number in kept.log if what == "fetch"] == order
    assert kept.most_ahead == max(1, min(ahead, 5))
    if ahead:
        assert all(
            kept.log.index(("fetch", n - 1)) < kept.log.index(("take", n - 1)) - (ahead > 1) for n in (2, 3)
        )
    assert not any(each.ahead is not None for each in kept.sent)


def test_what_is_never_asked_for_does_not_keep_the_rest_from_coming():
    first, second = (torch.randn(16, requires_grad=True) for _ in range(2))
    kept = HostActivations(CPU)
    with kept.kept():
        one, other = (first * 1.0).sin().sum(), (second * 1.0).sin().sum()
    one.backward()
    other.backward()
    assert torch.equal(first.grad, first.detach().cos())
    assert torch.equal(second.grad, second.detach().cos())


def test_a_change_in_place_between_two_uses_is_seen():
    first, second = (torch.randn(4, requires_grad=True) for _ in range(2))
    values = torch.arange(4.0)
    with HostActivations(CPU).kept():
        total = (values * first).sum()
        values.add_(1)
        total = total + (values * second).sum()
    values.zero_()
    total.backward()
    assert first.grad.tolist() == [0, 1, 2, 3]
    assert second.grad.tolist() == [1, 2, 3, 4]


def test_strides_come_back_too():
    turned = torch.randn(3, 4, requires_grad=True)
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            ctx.save_for_backward(tensor)
            return tensor.sum()

        @staticmethod
        def backward(ctx, grad):
            (tensor,) = ctx.saved_tensors
            seen.append(tensor)
            return grad * torch.ones_like(tensor)

    with HostActivations(CPU).kept():
        value = (turned * 2).t()
        total = Look.apply(value)
    total.backward()
    assert seen[0].stride() == (1, 4)
    assert torch.equal(seen[0], value)


@pytest.mark.gpu(1)
def test_offloaded_activations_free_the_gpu(tmp_path):
    path = make_tiny_model(tmp_path, hidden=512, layers=8)
    # Gigabytes that backward needs; so many tokens are added up in another order each time.
    large = [random_batch(8, max_tokens=1024, min_tokens=1024)]
    world, peaks, results = World(device="cuda"), [], []
    for offloads in (False, True):
        config = config_of(path, device="cuda", activation_offload=offloads, micro_batch_tokens=8192)
        results.append([tensor.cpu() for tensor in run(world, config)])
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(world, config, batches=large)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert same(results[1], results[0])
    assert peaks[1] < peaks[0]
