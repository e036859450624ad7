"""Compiled layers and deterministic kernels: the same answers, and torch's settings as they were."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from offbeat_engine import Fsdp2Config, ModelConfig, SftLoss, World
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.fsdp2.checks import refusals_here
from offbeat_engine.fsdp2.model import building
from offbeat_engine.testing import RankPool, make_tiny_model, random_batch, relative_error

BATCHES = [random_batch(8 + seed, seed=seed, max_tokens=20 + 4 * seed) for seed in range(4)]


def make_engine(path, world=None, loss_fn=None, **changes):
    config = Fsdp2Config(model=ModelConfig(path=path), micro_batch_tokens=60)
    engine = Fsdp2Engine(replace(config, **changes), World() if world is None else world)
    engine.init_model()
    engine.set_loss_fn(loss_fn or SftLoss())
    return engine


def train(engine, batches):
    """Return loss, log-probs and every gradient of each batch, in between steps of the optimizer."""
    trace = []
    with engine.train_mode():
        for batch in batches:
            engine.optimizer_zero_grad()
            predictions, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
            gradients = {name: tensor.clone() for name, tensor in engine.named_gradients()}
            trace.append((loss, engine.unshard_data(predictions)["logprobs"], gradients))
            engine.optimizer_step()
    return trace


def check(got, expected):
    for (loss, logprobs, gradients), (plain_loss, plain_logprobs, plain) in zip(got, expected, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-6)
        assert_close(logprobs, plain_logprobs, rtol=0, atol=1e-5)
        assert gradients.keys() == plain.keys()
        assert max(relative_error(gradients[name], plain[name]) for name in plain) <= 1e-4


compiles = pytest.mark.skipif(building.compiler_missing("cpu") is not None, reason="no compiler here")


@compiles
@pytest.mark.slow
@pytest.mark.deep
def test_compiled_layers_answer_alike_and_are_compiled_once_for_all_batches(tiny):
    from torch._dynamo.utils import counters

    engine = make_engine(tiny, compile=True)
    check(train(engine, BATCHES[:1]), train(make_engine(tiny), BATCHES[:1]))
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    engine, plain = make_engine(tiny, compile=True), make_engine(tiny)
    check(train(engine, BATCHES), train(plain, BATCHES))
    assert counters["stats"]["unique_graphs"] == compiled
    assert [spec.name for spec in engine.weight_manifest()] == [spec.name for spec in plain.weight_manifest()]


@compiles
@pytest.mark.deep
def test_a_compiled_mixture_of_experts_answers_alike(tmp_path):
    path = make_tiny_model(tmp_path, family="mixtral", num_local_experts=4)
    check(train(make_engine(path, compile=True), BATCHES), train(make_engine(path), BATCHES))


def train_sharded(world, path, changes):
    return train(make_engine(path, world, reshard="always", **changes), BATCHES[:2])


@compiles
@pytest.mark.deep
def test_compiled_layers_are_sharded_and_checkpointed_like_others(tiny):
    changes = {"compile": True, "activation_checkpointing": True}
    with RankPool(2) as ranks:  # one compiler a rank takes its time
        got = ranks.run(train_sharded, tiny, changes)[0]
    check(got, train(make_engine(tiny), BATCHES[:2]))


def test_without_a_compiler_compiling_is_refused():
    from torch._inductor import config as inductor

    # By torch's own means: what was set from outside and set back is gone from its settings.
    with inductor.patch("cpp.cxx", (None, "no-such-compiler")):
        refused = Fsdp2Engine.check(Fsdp2Config(model=ModelConfig(path="nowhere"), compile=True), 1)
    assert [refusal.setting for refusal in refused] == ["compile"]
    assert "no-such-compiler" in refused[0].reason


def test_compiling_beside_a_torch_below_a_path_with_a_space_is_refused(monkeypatch):
    """The linker's line holds the path unquoted: the first batch would end in a page of the linker's words."""
    monkeypatch.setattr(building.torch, "__file__", "/a folder/torch/__init__.py")
    [refused] = Fsdp2Engine.check(Fsdp2Config(model=ModelConfig(path="nowhere"), compile=True), 1)
    assert refused.setting == "compile"
    assert "'/a folder/torch'" in refused.reason


class Watching:
    """The supervised loss, which notes whether deterministic algorithms are asked for."""

    def __init__(self):
        self.seen = []

    def __call__(self, predictions, batch, scale):
        self.seen.append(torch.are_deterministic_algorithms_enabled())
        return SftLoss()(predictions, batch, scale)


def test_deterministic_holds_inside_calls_only(tiny):
    for wanted in (True, False):
        loss_fn = Watching()
        trace = train(make_engine(tiny, loss_fn=loss_fn, deterministic=wanted), BATCHES)
        again = train(make_engine(tiny, deterministic=wanted), BATCHES)
        assert set(loss_fn.seen) == {wanted}
        assert not torch.are_deterministic_algorithms_enabled()
        assert all(torch.equal(a[1], b[1]) for a, b in zip(trace, again, strict=True))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(make_engine(tiny, deterministic=True), BATCHES[:1])
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


class Undetermined:
    """A loss by an operation that has no deterministic form."""

    def __call__(self, predictions, batch, scale):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return SftLoss()(predictions, batch, scale)


def test_deterministic_refuses_what_has_no_such_kernel_and_is_off_again_after(tiny):
    train(make_engine(tiny, loss_fn=Undetermined()), BATCHES[:1])
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        train(make_engine(tiny, loss_fn=Undetermined(), deterministic=True), BATCHES[:1])
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_on_cuda_needs_cublas_told_beforehand(monkeypatch):
    config = Fsdp2Config(model=ModelConfig(path="nowhere"), device="cuda", deterministic=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    world = World(device="cuda")
    assert [refusal.setting for refusal in refusals_here(config, world)] == ["deterministic"]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert refusals_here(config, world) == []
    assert [refusal.setting for refusal in refusals_here(config, replace(world, local_rank=1))] == ["device"]
