"""Sequences of one unit are computed together in every way that this engine has, and a loss over them comes to the same."""

import functools

import pytest
import torch

from offbeat_engine import BatchError, Fsdp2Config, ModelConfig, OptimizerConfig, World, engine_class
from offbeat_engine.fsdp2 import stepping
from offbeat_engine.testing import make_tiny_model, reference_step, relative_error
from offbeat_engine.testing.compare import UnitLoss
from offbeat_engine.testing.models import scored_batch

WAYS = {
    "one at a time": {"micro_batch_tokens": 1},
    "few at a time": {"micro_batch_tokens": 60},
    "padded": {"micro_batch_tokens": 60, "packing": False},
    "varlen": {"micro_batch_tokens": 60, "attention": "varlen"},
}


def unit_batch():
    """Pairs far apart, one of three, and one alone; units are groups, too, and two of a pair begin alike."""
    batch = scored_batch(seed=3)
    batch["unit"] = torch.tensor([7, 3, 5, 7, 1, 3, 5, 2, 7])
    batch["input_ids"][5, :2] = batch["input_ids"][1, :2]
    batch["group"] = batch["unit"].clone()
    return batch


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def step(world, path, **settings):
    engine = engine_class("fsdp2")(Fsdp2Config(model=ModelConfig(path=path), **settings), world)
    engine.init_model()
    engine.set_loss_fn(UnitLoss())
    with engine.train_mode():
        engine.optimizer_zero_grad()
        _, loss, ctx = engine.forward_backward_step(engine.shard_data(unit_batch()))
        gradients = {name: tensor.clone() for name, tensor in engine.named_gradients()}
    engine.close()
    return loss, gradients, ctx.scale


def check(path, loss, gradients, scale):
    wanted = reference_step(path, [unit_batch()], UnitLoss(), OptimizerConfig())
    assert loss == pytest.approx(wanted.losses[0], rel=1e-5)
    assert (scale.num_units, scale.num_sequences) == (5, 9)
    for name, gradient in gradients.items():
        assert relative_error(gradient, wanted.first_grads[name]) <= 1e-4, name


@pytest.mark.parametrize("way", WAYS)
def test_on_one_rank(tiny, way):
    check(tiny, *step(World(), tiny, **WAYS[way]))


@pytest.mark.spawns
@pytest.mark.parametrize("way", [*WAYS, "sequence parallel"])
def test_on_two_ranks(tiny, two_ranks, way):
    settings = WAYS.get(way, {"micro_batch_tokens": 30, "sequence_parallel_size": 2})
    for result in two_ranks.run(functools.partial(step, **settings), tiny):
        check(tiny, *result)


def test_a_plan_that_parts_a_unit_is_refused(tiny, monkeypatch):
    plan = stepping.plan_micro_batches
    monkeypatch.setattr(
        stepping, "plan_micro_batches", lambda lengths, *, units, **rest: plan(lengths, **rest)
    )
    with pytest.raises(BatchError, match=r"micro-batches 0 and \d+ part the sequences of unit"):
        step(World(), tiny, micro_batch_tokens=1)
