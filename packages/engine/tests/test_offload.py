"""What waits in host memory comes back bit for bit, and is really away while it waits."""

from dataclasses import replace

import pytest
import torch

from offbeat_engine import (
    ConfigError,
    Fsdp2Config,
    ModelConfig,
    OptimizerConfig,
    SftLoss,
    World,
)
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.fsdp2.memory.offload import Offloadable
from offbeat_engine.fsdp2.weights.export import local
from offbeat_engine.testing import make_tiny_model, random_batch

BATCHES = [random_batch(7, seed=seed) for seed in range(3)]
BOTH = {"offload_parameters": True, "offload_optimizer": True}


def config_of(path, **changes):
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=0.5)
    base = Fsdp2Config(model=ModelConfig(path=path), optimizer=optimizer)
    return replace(base, **changes)


def make_engine(config, world=None):
    engine = Fsdp2Engine(config, World() if world is None else world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def bytes_here(engine):
    """Bytes of weights with gradients, and of moments, that are where the rank computes."""
    parts = engine._state
    weights = [tensor for p in parts.scorer.parameters() for tensor in (p, p.grad) if tensor is not None]
    moments = [tensor for state in parts.updater.moments().values() for tensor in state.values()]
    return [sum(local(t).untyped_storage().nbytes() for t in tensors) for tensors in (weights, moments)]


def run(world, config, folder, around=None):
    """Do everything an engine does outside and inside its modes; return all numbers, and who was where."""
    engine = make_engine(config, world)
    seen, places = [], []
    rule = engine._state.updater
    step = rule.step

    def seen_stepping(*rates):
        step(*rates)
        places.append(("step", *bytes_here(engine)))

    rule.step = seen_stepping
    for number, batch in enumerate(BATCHES):
        share = engine.shard_data(batch)
        with engine.eval_mode():
            places.append(("eval", *bytes_here(engine)))
            predictions, _ = engine.forward_backward_step(share, forward_only=True)
            seen.append(predictions["logprobs"])
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, loss, _ = engine.forward_backward_step(share)
        if around is not None:
            engine.to(around)
        # Gradients wait between the backward pass and the step.
        places.append(("none", *bytes_here(engine)))
        seen += [tensor.clone() for _, tensor in engine.named_gradients()]
        with engine.train_mode():
            seen.append(torch.tensor([loss, engine.optimizer_step(), engine.lr_scheduler_step()]))
            places.append(("train", *bytes_here(engine)))
        seen += [tensor.clone() for _, tensor in engine.named_weights()]
        if number == 1:
            engine.save_checkpoint(folder, global_step=2)
    other = make_engine(config, world)
    assert other.load_checkpoint(folder) == 2
    seen += [tensor.clone() for _, tensor in other.named_weights()]
    other.optimizer_zero_grad()
    with other.train_mode():
        other.forward_backward_step(share)
        seen.append(torch.tensor(other.optimizer_step()))
    engine.export_huggingface(f"{folder}/export")
    assert engine.weight_manifest()
    return seen, places


def check_away(places, *, weights, moments):
    for where, num_weights, num_moments in places:
        assert bool(num_weights) == (where != "none" or not weights)
        if moments or where == "step":
            assert bool(num_moments) == (where == "step")
    assert {where for where, _, _ in places} == {"eval", "none", "train", "step"}


@pytest.mark.parametrize(
    "changes",
    [BOTH, {"offload_parameters": True}, {"offload_optimizer": True}],
    ids=["both", "parameters", "optimizer"],
)
def test_offloading_changes_nothing_on_one_rank(tiny, tmp_path, changes):
    plain, _ = run(World(), config_of(tiny), str(tmp_path / "plain"))
    got, places = run(World(), config_of(tiny, **changes), str(tmp_path / "away"))
    assert len(got) == len(plain)
    assert all(torch.equal(mine, other) for mine, other in zip(got, plain, strict=True))
    check_away(places, weights="offload_parameters" in changes, moments="offload_optimizer" in changes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.deep),
        {"sequence_parallel_size": 2, "shard_size": 1},
        pytest.param({"micro_batch_tokens": 20, "activation_checkpointing": True}, marks=pytest.mark.deep),
    ],
    ids=["plain", "arranged", "micro-batches"],
)
def test_offloading_changes_nothing_on_two_ranks(tiny, two_ranks, tmp_path, changes):
    plain = two_ranks.run(run, config_of(tiny, **changes), str(tmp_path / "plain"))
    away = two_ranks.run(run, config_of(tiny, **changes, **BOTH), str(tmp_path / "away"))
    for (mine, places), (other, _) in zip(away, plain, strict=True):
        assert len(mine) == len(other)
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
        check_away(places, weights=True, moments=True)


def test_moving_out_and_back_by_hand_changes_nothing(tiny, tmp_path):
    plain, _ = run(World(), config_of(tiny), str(tmp_path / "plain"))
    got, _ = run(World(), config_of(tiny), str(tmp_path / "moved"), around="cpu")
    assert all(torch.equal(mine, other) for mine, other in zip(got, plain, strict=True))
    with pytest.raises(ConfigError, match='must be "cpu" or "cpu", got \'disk\''):
        make_engine(config_of(tiny)).to("disk")


def test_an_abandoned_stream_of_weights_does_not_take_them_from_training(tiny):
    engine = make_engine(config_of(tiny, **BOTH))
    stream = engine.named_weights()
    name, first = next(stream)
    with engine.train_mode():
        stream.close()
        engine.forward_backward_step(BATCHES[0])
        engine.optimizer_step()
    assert bytes_here(engine) == [0, 0]
    assert torch.isfinite(first).all()  # a copy: the weight itself is away
    assert name == engine.weight_manifest()[0].name


def test_a_set_is_away_only_while_nobody_holds_it():
    shared = torch.arange(12.0)
    tensors = [shared[:5], shared[5:], torch.arange(3), torch.empty(0)]
    before = [tensor.clone() for tensor in tensors]
    offloadable = Offloadable(lambda: tensors)
    offloadable.stay(in_host=True)
    assert offloadable._away
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 0, 0]
    with offloadable.resident():
        with offloadable.resident():
            assert not offloadable._away
        assert not offloadable._away
        assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))
        assert offloadable.addresses() == {shared.data_ptr(), tensors[2].data_ptr()}
        tensors[2] += 1
        offloadable.stay(in_host=False)
        offloadable.stay(in_host=True)
    assert offloadable._away
    offloadable.stay(in_host=True)
    offloadable.stay(in_host=False)
    assert tensors[2].tolist() == [1, 2, 3]
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors[:2], before[:2], strict=True))


@pytest.mark.gpu(1)
def test_offloading_frees_the_gpu(tmp_path):
    path = make_tiny_model(tmp_path / "model", hidden=512, layers=4)
    world = World(device="cuda")
    config = config_of(path, device="cuda")
    plain, _ = run(world, config, str(tmp_path / "plain"))
    got, places = run(world, replace(config, **BOTH), str(tmp_path / "away"))
    assert all(torch.equal(mine, other) for mine, other in zip(got, plain, strict=True))
    check_away(places, weights=True, moments=True)
    engine = make_engine(replace(config, **BOTH), world)
    with engine.train_mode():
        engine.forward_backward_step(BATCHES[0])
        between = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.optimizer_step()
        stepping = torch.cuda.max_memory_allocated()
    outside = torch.cuda.memory_allocated()
    num_bytes = 4 * sum(param.numel() for param in engine._state.scorer.parameters())
    assert between - outside >= 2 * num_bytes  # weights and gradients
    assert stepping - outside >= 4 * num_bytes  # and two moments, while the step is made


def test_a_stream_of_weights_lists_what_waits_once_and_not_for_each_name(tiny):
    engine = make_engine(config_of(tiny, offload_parameters=True))
    waiting, listed = engine._state.weights, []
    tensors = waiting._tensors
    waiting._tensors = lambda: (listed.append(1), tensors())[1]
    names = [name for name, _ in engine.named_weights()]
    assert len(names) > 20
    assert len(listed) == 2  # for their addresses, and to send them away again
