"""AdamW with moments of eight bits: near the exact one, a quarter of its memory, resumed to the last bit on any ranks."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, OptimizerName, SftLoss, World
from offbeat_engine.fsdp2 import Fsdp2Engine, checks
from offbeat_engine.testing import make_tiny_model, random_batch

BATCHES = [random_batch(8, seed=seed) for seed in range(6)]
needs_torchao = pytest.mark.skipif(not checks.has_torchao(), reason="needs the torchao package")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Rows of one block and of two; norms and biases, which have none."""
    return make_tiny_model(tmp_path_factory.mktemp("eight") / "tiny", hidden=256, layers=1)


def make_engine(path, world, **changes):
    optimizer = OptimizerConfig(name=changes.pop("name", OptimizerName.ADAMW_8BIT), lr=1e-3, weight_decay=0.1)
    config = Fsdp2Config(
        model=ModelConfig(path=path), optimizer=optimizer, collective_timeout_s=60.0, **changes
    )
    engine = Fsdp2Engine(config, world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def steps(engine, batches):
    for batch in batches:
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_step(engine.shard_data(batch))
            engine.optimizer_step()
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def moment_bytes(engine):
    states = engine._state.updater.moments().values()
    return sum(tensor.nbytes for state in states for tensor in state.values())


def train(world, path, name):
    engine = make_engine(path, world, name=name)
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    return before, steps(engine, BATCHES), moment_bytes(engine)


@needs_torchao
def test_it_goes_where_the_exact_one_goes_at_a_quarter_of_the_memory(model, two_ranks):
    before, exact, full = train(World(), model, OptimizerName.ADAMW)
    _, got, alone = train(World(), model, OptimizerName.ADAMW_8BIT)
    # Moments are rounded to within 1/128 of the largest of a block: some weights' steps to nothing.
    for name, tensor in exact.items():
        moved = tensor - before[name]
        if moved.norm():
            assert (got[name] - tensor).norm() < 0.3 * moved.norm(), name
    assert any(not torch.equal(got[name], tensor) for name, tensor in exact.items())
    assert alone < 0.27 * full
    shared = two_ranks.run(train, model, OptimizerName.ADAMW_8BIT)
    assert [part[2] for part in shared] == pytest.approx([alone / 2] * 2, rel=0.01)


def save(world, path, folder):
    engine = make_engine(path, world)
    steps(engine, BATCHES[:3])
    engine.save_checkpoint(folder, global_step=3)
    return states_of(engine), steps(engine, BATCHES[3:])


def load(world, path, folder, **changes):
    engine = make_engine(path, world, **changes)
    steps(engine, BATCHES[4:5])  # of another past
    assert engine.load_checkpoint(folder) == 3
    return states_of(engine), steps(engine, BATCHES[3:])


def states_of(engine):
    """Return the whole of every moment."""
    updater = engine._state.updater
    return {
        f"{name} {key}": tensor.clone() if key == "step" else whole_of(tensor, updater.params[name])
        for name, state in updater.moments().items()
        for key, tensor in state.items()
    }


def whole_of(shard, param):
    """Return the whole of a moment, which has the rows of its parameter."""
    if not isinstance(param, DTensor):
        return shard.clone()
    shape = torch.Size((param.shape[0], *shard.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        shard, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()


def same(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(right[name], tensor), name


@needs_torchao
def test_a_run_goes_on_to_the_last_bit(model, tmp_path, two_ranks):
    saved, after = two_ranks.run(save, model, str(tmp_path))[0]
    assert {tensor.dtype for tensor in saved.values()} == {torch.uint8, torch.float32}
    loaded, again = two_ranks.run(load, model, str(tmp_path))[0]
    same(loaded, saved)
    same(again, after)


@needs_torchao
def test_its_state_is_the_same_on_any_number_of_ranks(model, tmp_path, two_ranks, four_ranks):
    saved, after = two_ranks.run(save, model, str(tmp_path))[0]
    same(load(World(), model, str(tmp_path))[0], saved)
    loaded, again = four_ranks.run(load, model, str(tmp_path))[0]
    same(loaded, saved)
    for name, tensor in after.items():
        assert (again[name] - tensor).abs().max() < 1e-4, name


@needs_torchao
def test_it_waits_in_host_memory_like_any_other(model, two_ranks):
    away = {"offload_parameters": True, "offload_optimizer": True}
    expected = two_ranks.run(after_three, model, {})[0]
    same(two_ranks.run(after_three, model, away)[0], expected)


def after_three(world, path, changes):
    return steps(make_engine(path, world, **changes), BATCHES[:3])


def test_it_is_refused_where_torchao_is_not_installed(model, monkeypatch):
    monkeypatch.setattr(checks, "has_torchao", lambda: False)
    optimizer = OptimizerConfig(name=OptimizerName.ADAMW_8BIT)
    refused = Fsdp2Engine.check(Fsdp2Config(model=ModelConfig(path=model), optimizer=optimizer), 1)
    assert any("install offbeat-engine[torchao]" in str(each) for each in refused)


@needs_torchao
def test_only_the_first_step_makes_moments(model):
    engine = make_engine(model, World())
    rule, made = engine._state.updater, []
    empty = rule._empty
    rule._empty = lambda name, shard: (made.append(name), empty(name, shard))[1]
    steps(engine, BATCHES[:1])
    assert sorted(made) == sorted(rule._shards)
    steps(engine, BATCHES[1:3])
    assert rule.moments().keys() == rule._shards.keys()
    assert len(made) == len(rule._shards)
