"""The parts that only a GPU can run: its attention kernels on packed rows, and sequences shared over NCCL."""

from dataclasses import replace

import pytest
import torch

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, SftLoss, World
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.fsdp2.attention.packed import packed_attention
from offbeat_engine.fsdp2.attention.packing import RowInputs
from offbeat_engine.fsdp2.attention.varlen import plan_varlen
from offbeat_engine.testing import RankPool, random_batch, relative_error

BATCHES = [random_batch(9, seed=seed) for seed in range(2)]


SHAPES = {
    "grouped": {"heads": (4, 2), "size": 64},
    "odd size": {"heads": (2, 2), "size": 20},  # padded to 24
    "large": {"heads": (4, 1), "size": 256},
}


@pytest.mark.gpu(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("share", [False, True])
def test_the_kernels_of_a_gpu_are_the_plain_one(share, window, shape):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (3, 33), generator=draw)
    ids[:, :12] = ids[0, :12]
    fed = torch.arange(33)[None] < torch.tensor([33, 14, 21])[:, None]
    inputs, _ = RowInputs(plan_varlen, share)(ids, fed, torch.device("cpu"))
    num_tokens, (num_query, num_kv), size = inputs["input_ids"].shape[1], *SHAPES[shape].values()
    heads = [
        torch.randn(1, number, num_tokens, size, generator=draw).bfloat16()
        for number in (num_query, num_kv, num_kv)
    ]
    weights = torch.randn(1, num_tokens, num_query, size, generator=draw)
    results = []
    for device in ("cpu", "cuda"):
        plan = RowInputs(plan_varlen, share)(ids, fed, torch.device(device))
        # On the CPU in float32: the one is exact up to its rounding, the other up to bfloat16's.
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        mine = [each.to(device, dtype).requires_grad_() for each in heads]
        module = torch.nn.Identity()
        out = packed_attention(module, *mine, None, packed=plan[0]["packed"], sliding_window=window)[0]
        grads = torch.autograd.grad((out * weights.to(device)).sum(), mine)
        results.append([each.detach().float().cpu() for each in (out, *grads)])
    for got, exact in zip(results[1], results[0], strict=True):
        assert relative_error(got, exact) < 1e-2


def train(world, config):
    engine = Fsdp2Engine(config, world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    losses = []
    with engine.train_mode():
        for batch in BATCHES:
            engine.optimizer_zero_grad()
            predictions, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
            grads = {name: tensor.cpu() for name, tensor in engine.named_gradients()}
            losses.append(loss)
            engine.optimizer_step()
    return losses, grads, engine.unshard_data(predictions)["logprobs"]


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shard_size": 1},
        {"activation_offload": True, "offload_parameters": True, "offload_optimizer": True},
    ],
    ids=["shared", "copies", "offloaded"],
)
def test_two_gpus_that_share_sequences_are_one_cpu(tiny, changes):
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-4)
    config = Fsdp2Config(model=ModelConfig(path=tiny), optimizer=optimizer)
    losses, grads, logprobs = train(World(), config)
    shared = replace(config, device="cuda", sequence_parallel_size=2, micro_batch_tokens=40, **changes)
    with RankPool(2, device="cuda") as ranks:
        for mine, my_grads, my_logprobs in ranks.run(train, shared):
            assert mine == pytest.approx(losses, rel=1e-5)
            assert max(relative_error(my_grads[name], grads[name]) for name in grads) <= 1e-3
            assert float((my_logprobs - logprobs).abs().max()) <= 1e-4
