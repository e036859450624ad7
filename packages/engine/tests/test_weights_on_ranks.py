"""Weights for some ranks: whole there, bit for bit, and the others never hold more than shards."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offbeat_engine import Dtype, Engine, Fsdp2Config, LoraConfig, ModelConfig, SftLoss
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_engine.testing.reference import load_reference

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operation gives back on this rank; of a DTensor, its shard."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                held = each._local_tensor if isinstance(each, DTensor) else each
                self.size = max(self.size, held.numel())
        return out


@contextmanager
def trained(world, config):
    """An engine after a step, so that adapters are not zero, sharded layer by layer."""
    engine = Fsdp2Engine(replace(config, reshard="always"), world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    with engine.train_mode():
        engine.forward_backward_step(engine.shard_data(random_batch(4, vocab_size=61)))
        engine.optimizer_step()
    try:
        yield engine
    finally:
        engine.close()


def copied(named):
    return {name: None if tensor is None else tensor.clone() for name, tensor in named}


def read_on(world, config, ranks):
    """Return the weights as everybody gets them, as `ranks` do, the largest shard, and the largest tensor of either way."""
    with trained(world, config) as engine:
        everywhere = copied(engine.named_weights())
        with Largest() as plainly:
            for _ in Engine.named_weights_on(engine, ranks):
                pass
        with Largest() as sparingly:
            some = list(engine.named_weights_on(ranks))  # all at once: none is memory that a later one needs
        held = engine._state.scorer.parameters()
        shard = max(-(-len(each) // world.size) * each.shape[1:].numel() for each in held)
        return everywhere, dict(some), (sparingly.size, shard, plainly.size)


def check(answers, ranks):
    everywhere = answers[0][0]
    for rank, (_, some, sizes) in enumerate(answers):
        assert list(some) == list(everywhere)
        if rank in ranks:
            for name, tensor in everywhere.items():
                assert some[name].dtype == tensor.dtype
                assert torch.equal(some[name], tensor), name
        else:
            assert set(some.values()) == {None}
            sparingly, shard, plainly = sizes
            assert sparingly <= shard < plainly


CASES = {
    "float32": ("qwen2", {}),
    "bfloat16": ("llama", {"dtype": Dtype.BFLOAT16}),
    "merged": ("qwen2", {"lora": LoraConfig(rank=2)}),
    "experts": ("qwen3_moe", {}),
}


def config_of(tmp_path, name):
    family, changes = CASES[name]
    # 61 rows of the embedding do not come out even.
    path = make_tiny_model(
        tmp_path, family=family, vocab_size=61, **(EXPERTS if family == "qwen3_moe" else {})
    )
    return Fsdp2Config(model=ModelConfig(path=path), **changes)


@pytest.mark.parametrize("ranks", [(1,), (0,)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_want_nothing_hold_no_more_than_a_shard(tmp_path, two_ranks, name, ranks):
    config = config_of(tmp_path, name)
    check(two_ranks.run(read_on, config, ranks), ranks)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [((), {}), ((0, 1), {}), ((1,), {"offload_parameters": True}), ((0,), {"shard_size": 1})],
    ids=str,
)
def test_whoever_wants_them_has_them_and_nobody_else(tmp_path, two_ranks, ranks, changes):
    config = replace(config_of(tmp_path, "float32"), **changes)
    for rank, (everywhere, some, _) in enumerate(two_ranks.run(read_on, config, ranks)):
        for name, tensor in everywhere.items():
            assert (some[name] is None) == (rank not in ranks)
            assert rank not in ranks or torch.equal(some[name], tensor)


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [(2,), (0, 3)], ids=str)
def test_of_several_copies_only_those_that_are_asked_meet(tmp_path, four_ranks, ranks):
    config = replace(config_of(tmp_path, "float32"), shard_size=2)
    for rank, (everywhere, some, _) in enumerate(four_ranks.run(read_on, config, ranks)):
        for name, tensor in everywhere.items():
            assert (some[name] is None) == (rank not in ranks)
            assert rank not in ranks or torch.equal(some[name], tensor)


def exported(world, config, folder):
    """Return the largest shard, and the largest tensor of an export on this rank, which rank 0 alone writes."""
    with trained(world, config) as engine:
        with Largest() as sparingly:
            engine.export_huggingface(folder)
        held = engine._state.scorer.parameters()
        return max(-(-len(each) // world.size) * each.shape[1:].numel() for each in held), sparingly.size


def test_an_export_gathers_where_it_is_written(tmp_path, two_ranks):
    (shard, first), (_, second) = two_ranks.run(
        exported, config_of(tmp_path / "m", "float32"), str(tmp_path / "x")
    )
    assert second <= shard < first
    assert load_reference(str(tmp_path / "x")).config.vocab_size == 61
