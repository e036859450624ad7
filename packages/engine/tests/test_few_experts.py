"""Mixtures whose experts do not come out even over the ranks: every rank holds its share of them all the same."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close

from offbeat_engine import (
    Fsdp2Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    SftLoss,
    World,
)
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import RankPool, make_tiny_model, random_batch

pytestmark = pytest.mark.spawns
FAMILIES = {
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
# Over four ranks, and over two replicas of two: 2 and 3 experts, of which the latter divide by neither.
LAYOUTS = [
    ("mixtral", {}),
    pytest.param("qwen3_moe", {}, marks=pytest.mark.deep),
    ("qwen3_moe", {"shard_size": 2}),
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        family: make_tiny_model(folder / family, family=family, tie_word_embeddings=False, **settings)
        for family, settings in FAMILIES.items()
    }


def built(world, path, settings):
    settings = {"optimizer": ADAMW, "reshard": "always", **settings}
    engine = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path), micro_batch_tokens=80, **settings), world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


ADAMW = OptimizerConfig(lr=1e-3, max_grad_norm=0.5)


def steps(engine, seeds):
    """Train on a batch of each seed; return the losses and norms, and the gradients of the last."""
    losses, grads = [], {}
    for seed in seeds:
        with engine.train_mode():
            engine.optimizer_zero_grad()
            _, loss, _ = engine.forward_backward_step(engine.shard_data(random_batch(8, seed=seed)))
            grads = {name: grad.clone() for name, grad in engine.named_gradients()}
            losses += [loss, engine.optimizer_step()]
    return losses, grads


def weights_of(engine):
    return {name: weight.clone() for name, weight in engine.named_weights()}


def trained(world, path, settings, folder):
    engine = built(world, path, settings)
    start = weights_of(engine)
    losses, grads = steps(engine, (1, 2))
    engine.save_checkpoint(str(Path(folder) / "checkpoint"))
    engine.export_huggingface(str(Path(folder) / "export"))
    on_one = {name: weight for name, weight in engine.named_weights_on([1]) if weight is not None}
    held = sum(
        param.to_local().numel() for param in engine._state.scorer.parameters() if isinstance(param, DTensor)
    )
    return (
        start,
        losses,
        grads,
        weights_of(engine),
        {name: weight.clone() for name, weight in on_one.items()},
        held,
    )


def resumed(world, path, settings, folder):
    engine = built(world, path, settings)
    assert engine.load_checkpoint(str(Path(folder) / "checkpoint")) == 0
    loaded = weights_of(engine)
    return loaded, steps(engine, (3,)), weights_of(engine)


def near(got, expected, tolerance=1e-5):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name] - tensor).norm() <= tolerance * max(1.0, float(tensor.norm())), name


@pytest.mark.parametrize(("family", "settings"), LAYOUTS, ids=str)
def test_everything_is_as_on_one_rank(mixture, four_ranks, two_ranks, tmp_path, family, settings):
    path = mixture[family]
    start, losses, grads, weights, _, _ = trained(World(), path, {}, tmp_path / "one")
    found = four_ranks.run(trained, path, settings, tmp_path / "four")
    for rank, (their_start, their_losses, their_grads, their_weights, on_one, _) in enumerate(found):
        assert all(torch.equal(their_start[name], weight) for name, weight in start.items())
        assert their_losses == pytest.approx(losses, rel=1e-5)
        near(their_grads, grads)
        near(their_weights, weights)
        assert on_one.keys() == (weights.keys() if rank == 1 else set())
        assert all(torch.equal(weight, found[0][3][name]) for name, weight in on_one.items())
    written = load_file(tmp_path / "four" / "export" / "model.safetensors")
    assert all(torch.equal(weight, found[0][3][name]) for name, weight in written.items())

    expected = resumed(World(), path, {}, tmp_path / "four")
    assert all(torch.equal(expected[0][name], weight) for name, weight in found[0][3].items())
    for again in (
        four_ranks.run(resumed, path, settings, tmp_path / "four")[2],
        two_ranks.run(resumed, path, {}, tmp_path / "four")[1],
    ):
        assert all(torch.equal(expected[0][name], weight) for name, weight in again[0].items())
        assert again[1][0] == pytest.approx(expected[1][0], rel=1e-5)
        near(again[2], expected[2])
    back = four_ranks.run(resumed, path, settings, tmp_path / "one")[3]
    assert all(torch.equal(back[0][name], weight) for name, weight in weights.items())


def shares(world, path, settings):
    params = built(world, path, settings)._state.scorer.hf.named_parameters()
    return {name: (param.to_local().numel(), param.numel(), param.placements[-1]) for name, param in params}


def test_every_rank_holds_its_part_of_each_expert(mixture, four_ranks):
    for by_name in four_ranks.run(shares, mixture["mixtral"], {}):
        experts = {name: share for name, share in by_name.items() if "experts" in name}
        assert len(experts) == 4
        assert all(mine * 4 == whole for mine, whole, _ in experts.values())
        # Not along dimension 1 of what two tensors of the files lie one after the other in.
        assert all(share[2] == Shard(2) for name, share in experts.items() if "gate_up" in name)


@pytest.mark.parametrize(
    "settings",
    [{"lora": LoraConfig(rank=2)}],
    ids=["lora"],
)
def test_other_ways_to_train_them(mixture, four_ranks, tmp_path, settings):
    path = mixture["mixtral"]
    expected = trained(World(), path, settings, tmp_path / "one")
    found = four_ranks.run(trained, path, settings, tmp_path / "four")
    assert found[0][1] == pytest.approx(expected[1], rel=1e-5)
    near(found[0][3], expected[3])
    loaded = four_ranks.run(resumed, path, settings, tmp_path / "one")[0][
        0
    ]  # LoRA: the base has one fingerprint
    near(loaded, expected[3], 1e-6)
    assert_close(found[3][3], found[0][3], rtol=0, atol=0)


def test_three_ranks_which_divide_nothing_hold_rows_or_none(mixture, two_ranks, tmp_path):
    path = mixture["mixtral"]
    start, losses, _, weights, _, _ = trained(World(), path, {}, tmp_path / "one")
    with RankPool(3) as three:
        by_rank = three.run(shares, path, {})
        found = three.run(trained, path, {}, tmp_path / "three")
        back = three.run(resumed, path, {}, tmp_path / "one")[2]
    experts = [name for name in by_rank[0] if "experts" in name]
    assert [sum(share[0] for name, share in each.items() if name in experts) > 0 for each in by_rank] == [
        True,
        True,
        False,
    ]
    assert found[2][1] == pytest.approx(losses, rel=1e-5)
    assert all(torch.equal(found[2][0][name], weight) for name, weight in start.items())
    assert all(torch.equal(back[0][name], weight) for name, weight in weights.items())
    expected = resumed(World(), path, {}, tmp_path / "three")
    again = two_ranks.run(resumed, path, {}, tmp_path / "three")[1]
    for loaded in (expected, again):
        assert all(torch.equal(loaded[0][name], weight) for name, weight in found[0][3].items())
    near(again[2], expected[2])
