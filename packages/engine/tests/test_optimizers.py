"""Adafactor on shards is Adafactor on whole weights, at any number of ranks and over a checkpoint."""

from dataclasses import replace

import pytest
import torch

from offbeat_engine import (
    CheckpointError,
    Dtype,
    Fsdp2Config,
    ModelConfig,
    OptimizerConfig,
    OptimizerName,
    SftLoss,
    World,
)
from offbeat_engine.fsdp2 import Fsdp2Engine, optimizers, sharding
from offbeat_engine.testing import random_batch, relative_error
from offbeat_engine.testing.reference import load_reference, reference_logprobs
from offbeat_engine.values import LossScale

BATCHES = [random_batch(8, seed=seed) for seed in range(5)]
ADAFACTOR = OptimizerConfig(
    name=OptimizerName.ADAFACTOR, lr=2e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=3
)
RATES = [2e-2 / 3, 4e-2 / 3, 2e-2, 2e-2, 2e-2]


def make_engine(path, world, **changes):
    config = Fsdp2Config(model=ModelConfig(path=path), optimizer=ADAFACTOR)
    engine = Fsdp2Engine(replace(config, **changes), world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def steps(engine, batches):
    losses = []
    with engine.train_mode():
        for batch in batches:
            engine.optimizer_zero_grad()
            losses.append(engine.forward_backward_step(engine.shard_data(batch))[1])
            engine.optimizer_step()
            engine.lr_scheduler_step()
    return losses


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def train(world, path, small):
    sharding.SMALL_MODEL_BYTES = small
    engine = make_engine(path, world)
    losses = steps(engine, BATCHES)
    sharding.SMALL_MODEL_BYTES = 256 << 20
    return losses, weights_of(engine)


@pytest.fixture(scope="module")
def plain(tiny):
    model = load_reference(tiny)
    optimizer = torch.optim.Adafactor(model.parameters(), weight_decay=0.1)
    losses = []
    for rate, batch in zip(RATES, BATCHES, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        scale = LossScale(num_tokens=int(batch["loss_mask"].sum()), num_sequences=8)
        loss = SftLoss()(reference_logprobs(model, batch), batch, scale).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def worst(got, expected):
    assert got.keys() == expected.keys()
    return max(relative_error(got[name], expected[name]) for name in expected)


def test_one_rank_is_torchs_adafactor(tiny, plain):
    losses, weights = train(World(), tiny, 256 << 20)
    assert losses == pytest.approx(plain[0], rel=1e-6)
    assert losses[-1] < losses[0]
    assert worst(weights, plain[1]) <= 1e-5


@pytest.mark.parametrize("small", [256 << 20, 0], ids=["whole", "layers"])
def test_two_ranks_are_torchs_adafactor(tiny, plain, two_ranks, small):
    first, second = two_ranks.run(train, tiny, small)
    assert first[0] == pytest.approx(plain[0], rel=1e-6)
    assert worst(first[1], plain[1]) <= 1e-5
    assert worst(second[1], first[1]) == 0.0


SHAPES = [(5, 7), (6,), (1,), (3, 4, 6), (1, 8), (8, 1)]


def draw(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run_rule(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.size,))
    params = {
        str(n): torch.nn.Parameter(distribute_tensor(draw(shape, n), mesh, [Shard(0)]))
        for n, shape in enumerate(SHAPES)
    }
    rule = optimizers.Adafactor(ADAFACTOR, params)
    for step in range(3):
        for n, shape in enumerate(SHAPES):
            params[str(n)].grad = distribute_tensor(draw(shape, 10 * step + n), mesh, [Shard(0)])
        rule.step(0.01)
    shapes = {
        name: {key: tuple(tensor.shape) for key, tensor in state.items()}
        for name, state in rule.moments().items()
    }
    empty = {
        name: {key: tuple(tensor.shape) for key, tensor in state.items()}
        for name, state in rule.empty_moments().items()
    }
    assert shapes == empty
    return [param.detach().full_tensor() for param in params.values()]


def test_the_same_gradients_give_the_same_bits_on_one_rank_and_two(two_ranks):
    params = [torch.nn.Parameter(draw(shape, n)) for n, shape in enumerate(SHAPES)]
    optimizer = torch.optim.Adafactor(params, lr=0.01, weight_decay=0.1)
    for step in range(3):
        for n, param in enumerate(params):
            param.grad = draw(param.shape, 10 * step + n)
        optimizer.step()
    for got, expected in zip(two_ranks.run(run_rule)[0], params, strict=True):
        assert torch.equal(got, expected)


def save(world, path, root):
    engine = make_engine(path, world)
    steps(engine, BATCHES[:2])
    engine.save_checkpoint(root, global_step=2)
    return steps(engine, BATCHES[2:]), weights_of(engine)


def load(world, path, root):
    engine = make_engine(path, world, model=ModelConfig(path=path, random_init=True, seed=9))
    assert engine.load_checkpoint(root) == 2
    return steps(engine, BATCHES[2:]), weights_of(engine)


def test_a_checkpoint_resumes_bit_for_bit_and_on_another_number_of_ranks(tiny, tmp_path, two_ranks):
    losses, weights = two_ranks.run(save, tiny, str(tmp_path / "two"))[0]
    again, same = two_ranks.run(load, tiny, str(tmp_path / "two"))[0]
    assert losses == again
    assert worst(same, weights) == 0.0
    alone, close = load(World(), tiny, str(tmp_path / "two"))
    assert alone == pytest.approx(losses, rel=1e-6)
    assert worst(close, weights) <= 1e-5
    save(World(), tiny, str(tmp_path / "one"))
    assert two_ranks.run(load, tiny, str(tmp_path / "one"))[0][0] == pytest.approx(losses, rel=1e-6)


def test_another_optimizers_checkpoint_is_refused(tiny, tmp_path):
    save(World(), tiny, str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"the optimizer `adafactor` has gathered, and this engine has `adamw`"
    ):
        make_engine(tiny, World(), optimizer=OptimizerConfig()).load_checkpoint(str(tmp_path))


def state_size(world, path):
    engine = make_engine(path, world, dtype=Dtype.BFLOAT16)
    losses = steps(engine, BATCHES)
    moments = engine._parts.updater.moments()
    state = sum(tensor.numel() for entry in moments.values() for tensor in entry.values())
    return losses, state, sum(param.numel() for param in engine._parts.updater.params.values())


def test_in_bf16_it_learns_with_little_state(tiny, plain, two_ranks):
    losses, state, num_weights = two_ranks.run(state_size, tiny)[0]
    assert losses == pytest.approx(plain[0], rel=0.05)
    assert state < 0.2 * num_weights
