"""Settings that trade memory for speed: they change where things wait, never what comes out."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat_engine import (
    Dtype,
    Fsdp2Config,
    ModelConfig,
    OptimizerConfig,
    SftLoss,
    World,
)
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.fsdp2.memory import sharding
from offbeat_engine.testing import RankPool, make_tiny_model, random_batch, relative_error

BATCHES = [random_batch(8, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("memory") / "tiny", layers=3)


def make_engine(path, world, changes, layered=True):
    """Return an engine whose layers are groups of their own if `layered`, several micro-batches to a batch."""
    config = Fsdp2Config(
        model=ModelConfig(path=path), optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=60
    )  # fmt: skip
    small = sharding.SMALL_MODEL_BYTES
    sharding.SMALL_MODEL_BYTES = 0 if layered else small
    try:
        engine = Fsdp2Engine(replace(config, **changes), world)
        engine.init_model()
    finally:
        sharding.SMALL_MODEL_BYTES = small
    engine.set_loss_fn(SftLoss())
    return engine


def gathered(engine):
    """Return how many of the layers have all of their weights here."""
    groups = [module for module in engine._state.scorer.modules() if isinstance(module, FSDPModule)]
    return sum(not hasattr(next(module.parameters()), "placements") for module in groups)


def run(world, path, changes):
    """Train two steps; return losses, norms, gradients, weights, and groups gathered between forward and backward."""
    engine, seen, most = make_engine(path, world, changes), {}, []

    class Looking:
        entropy_gradient = False

        def __call__(self, predictions, batch, scale):
            most.append(gathered(engine))
            return SftLoss()(predictions, batch, scale)

    engine.set_loss_fn(Looking())
    with engine.train_mode():
        for number, batch in enumerate(BATCHES):
            engine.optimizer_zero_grad()
            _, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
            seen[f"loss {number}"] = torch.tensor(loss)
            seen |= {f"gradient {number} {name}": grad.clone() for name, grad in engine.named_gradients()}
            seen[f"norm {number}"] = torch.tensor(engine.optimizer_step())
            assert gathered(engine) == 0
    seen |= {name: tensor.clone() for name, tensor in engine.named_weights()}
    return seen, max(most)


def same(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"reshard": "always"}, 0),
        ({"reshard": "never"}, 4),
        ({"reshard": "always", "shard_size": 1}, 0),
        ({"reshard": "never", "shard_size": 1}, 4),
    ],
    ids=["always", "never", "always, copies", "never, copies"],
)
def test_when_weights_are_let_go_of_changes_nothing(model, two_ranks, changes, most):
    plain = {key: value for key, value in changes.items() if key != "reshard"}
    expected, usual = two_ranks.run(run, model, plain)[0]
    got, held = two_ranks.run(run, model, changes)[0]
    same(got, expected)
    assert held == most
    # Otherwise the group outside the layers, which backward needs at once; all where each rank holds them all.
    assert usual == (4 if "shard_size" in changes else 1)


@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "mixtral"])
def test_an_embedding_of_its_own_is_a_group_of_its_own(family, tmp_path, two_ranks):
    path = make_tiny_model(tmp_path / family, family=family, layers=3, tie_word_embeddings=False)
    alone, _ = run(World(), path, {})
    got, held = two_ranks.run(run, path, {})[0]
    assert held == 2  # both ends of the model, which are never gathered into one buffer
    assert two_ranks.run(run, path, {"reshard": "always"})[0][1] == 0
    first = [name for name in got if name.startswith(("loss", "norm", "gradient 0"))]
    assert [name for name in first if not torch.allclose(got[name], alone[name], rtol=1e-4, atol=1e-6)] == []


@pytest.mark.parametrize("changes", [{}, {"shard_size": 1}], ids=["shards", "copies"])
def test_gradients_added_up_in_bfloat16_are_off_by_its_rounding(model, two_ranks, changes):
    exact = two_ranks.run(run, model, changes)[0][0]
    got = two_ranks.run(run, model, {**changes, "reduce_dtype": Dtype.BFLOAT16})[0][0]
    errors = [relative_error(got[name], exact[name]) for name in exact if name.startswith("gradient 0")]
    # Each of the micro-batches' gradients is rounded once or twice to eight bits.
    assert 1e-4 < max(errors) < 2.0**-7


def gradients_of_many(world, path, changes, layered):
    engine = make_engine(path, world, {"micro_batch_tokens": 24, **changes}, layered)
    batch = random_batch(192, seed=3)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        _, _, ctx = engine.forward_backward_step(engine.shard_data(batch))
        assert ctx.stats.num_micro_batches > 50
        return {name: grad.clone() for name, grad in engine.named_gradients()}


@pytest.mark.parametrize(
    ("changes", "layered"),
    [
        ({}, True),
        pytest.param({}, False, marks=pytest.mark.deep),
        pytest.param({"shard_size": 1}, True, marks=pytest.mark.deep),
        ({"shard_size": 1}, False),
    ],
    ids=["layers", "one group", "copies", "copies, one group"],
)
def test_micro_batches_are_added_up_in_float32(model, two_ranks, changes, layered):
    exact = two_ranks.run(gradients_of_many, model, changes, layered)[0]
    low = {**changes, "reduce_dtype": Dtype.BFLOAT16}
    got = two_ranks.run(gradients_of_many, model, low, layered)[0]
    errors = [relative_error(got[name], exact[name]) for name in exact]
    # Rounded once for each micro-batch, half up and half down; a sum kept in bfloat16 is off by 1 to 3 %.
    assert 1e-4 < sum(errors) / len(errors) < 0.004


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def count(path, changes):
    """Return the matrix products of a step, and its gradients."""
    engine = make_engine(path, World(), changes)
    with engine.train_mode(), Products() as products:
        engine.forward_backward_step(BATCHES[0])
    return products.count, {name: grad.clone() for name, grad in engine.named_gradients()}


RECOMPUTED = [
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "checkpoint_keeps": "products"},
]


def test_what_is_computed_again_changes_nothing(model):
    few, expected = count(model, {})
    many, again = count(model, RECOMPUTED[0])
    some, got = count(model, RECOMPUTED[1])
    same(again, expected)
    same(got, expected)
    assert some == few < many


def test_what_is_computed_again_changes_nothing_on_two_ranks(model, two_ranks):
    expected = two_ranks.run(run, model, {})[0][0]
    for changes in RECOMPUTED:
        same(two_ranks.run(run, model, changes)[0][0], expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"checkpoint_keeps": "products"}, "checkpoint_keeps: nothing is computed again"),
        (
            {"activation_checkpointing": True, "checkpoint_keeps": "products", "compile": True},
            "checkpoint_keeps: a compiled layer",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(model, changes, reason):
    refused = Fsdp2Engine.check(Fsdp2Config(model=ModelConfig(path=model), **changes), 1)
    assert any(str(each).startswith(reason) for each in refused)


def gradients_of_one_share(world, path, batch):
    engine = make_engine(path, world, {"micro_batch_tokens": 10_000})
    mine = batch if world.rank == 0 else batch[:0]
    with engine.train_mode():
        engine.forward_backward_step(mine)
    return {name: grad.clone() for name, grad in engine.named_gradients()}


def test_gradients_of_three_ranks_are_sums_to_the_last_bit(model):
    """Two of the three have nothing: what they add is zero, and the rest is what one rank alone would have."""
    expected = gradients_of_one_share(World(), model, BATCHES[0])
    with RankPool(3) as three:
        same(three.run(gradients_of_one_share, model, BATCHES[0])[1], expected)
