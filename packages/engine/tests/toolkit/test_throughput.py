"""What a step is said to have taken: operations by hand, seconds, bytes."""

import pytest
import torch

from offbeat_engine import LoraConfig, ModelConfig, SftLoss, StepContext, World
from offbeat_engine.fsdp2 import Fsdp2Config, Fsdp2Engine
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_engine.toolkit.step.micro_batches import MicroBatches, StepRequest
from offbeat_engine.toolkit.step.throughput import Meter, ModelCost

# A tiny Qwen2: hidden 32, 4 heads on 2 of keys and values of 8 each, MLPs of 64, a vocabulary of 64, two layers.
ATTENTION = (32 * 32 + 32) + 2 * (32 * 16 + 16) + 32 * 32
MLP = 3 * 32 * 64
LAYER = ATTENTION + MLP + 2 * 32
HEAD = 64 * 32
MULTIPLIED = 2 * LAYER + 32 + HEAD
PER_TOKEN_AND_PAIR = (
    2 * 2 * 32 * 2 / 2
)  # two layers, scores and sums of values, 2 operations on 32 numbers; half is masked


def cost_of(path, **settings):
    config = Fsdp2Config(model=ModelConfig(path=path), **settings)
    engine = Fsdp2Engine(config, World())
    engine.init_model()
    return engine._state.cost


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "untied", tie_word_embeddings=False)


def test_lookups_do_not_count_and_a_tied_table_counts_as_the_head(tied, untied):
    expected = ModelCost(num_params=MULTIPLIED, num_trained=MULTIPLIED, num_layers=2, attention_width=32)
    assert cost_of(tied) == expected
    assert cost_of(untied) == expected


def test_operations_of_a_step_are_those_of_the_formula(tied):
    cost = cost_of(tied)
    tokens, pairs = 10 + 6, 10**2 + 6**2
    assert cost.flops(tokens, pairs, backward=False) == 2 * MULTIPLIED * tokens + PER_TOKEN_AND_PAIR * pairs
    assert cost.flops(tokens, pairs, backward=True) == 3 * cost.flops(tokens, pairs, backward=False)


def test_frozen_weights_get_no_gradient(tied):
    cost = cost_of(tied, freeze=("*.mlp.*",))
    assert cost.num_params - cost.num_trained == 2 * MLP
    step = cost.flops(10, 100, backward=True)
    assert step == 6 * (MULTIPLIED - 2 * MLP) * 10 + 4 * 2 * MLP * 10 + 3 * PER_TOKEN_AND_PAIR * 100


def test_adapters_alone_are_trained(tied):
    cost = cost_of(tied, lora=LoraConfig(rank=4, alpha=8.0, targets=("q_proj",)))
    adapters = 2 * 4 * (32 + 32)
    assert (cost.num_params, cost.num_trained) == (MULTIPLIED + adapters, adapters)
    assert cost.flops(1, 0, backward=True) == 4 * MULTIPLIED + 6 * adapters


def test_of_experts_those_count_that_a_token_visits(tmp_path):
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 1}
    one = cost_of(make_tiny_model(tmp_path / "one", family="mixtral", **sizes))
    all_of_them = cost_of(
        make_tiny_model(tmp_path / "all", family="mixtral", **sizes | {"num_experts_per_tok": 4})
    )
    assert all_of_them.num_params - one.num_params == 2 * 3 * MLP


def test_a_step_has_its_seconds_its_bytes_and_the_share_of_the_peak():
    cost = ModelCost(num_params=1000, num_trained=0, num_layers=2, attention_width=8)
    request = StepRequest(
        world=World(), device=torch.device("cpu"), names=("logprobs", "entropy"), data_rank=0, data_size=1,
        loss_fn=SftLoss(), cost=cost, peak_flops=1e9,
    )  # fmt: skip
    batch, ctx = random_batch(3), StepContext()
    before = Meter(torch.device("cpu")).peak_bytes()
    run = MicroBatches(request, batch, ctx, lambda batch: [[0, 1, 2]])
    logprobs = torch.zeros(run.rows(0)["input_ids"].shape, requires_grad=True)
    run.loss(0, {"logprobs": logprobs, "entropy": logprobs.detach()}, logprobs)
    run.finish()
    stats, lengths = ctx.stats, batch["lengths"]
    operations = 4 * 1000 * int(lengths.sum()) + 3 * 2 * 2 * 8 * int(lengths.square().sum())
    assert stats.elapsed_s > 0
    assert stats.mfu == pytest.approx(operations / (1e9 * stats.elapsed_s))
    assert stats.peak_memory_bytes >= before > 1 << 20
