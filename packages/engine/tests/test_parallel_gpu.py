"""The parts that only a GPU can run: flash-attention's kernel on packed rows, and sequences shared over NCCL."""

from dataclasses import replace

import pytest
import torch

from offbeat_engine import Fsdp2Config, ModelConfig, OptimizerConfig, SftLoss, World
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.fsdp2.attention import packed_attention
from offbeat_engine.fsdp2.packing import flash_rows_inputs, packed_inputs
from offbeat_engine.testing import RankPool, random_batch, relative_error

BATCHES = [random_batch(9, seed=seed) for seed in range(2)]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("window", [None, 5])
def test_flash_attention_on_packed_rows_is_sdpa(window):
    pytest.importorskip("flash_attn")
    device = torch.device("cuda")
    ids = torch.zeros(3, 11, dtype=torch.int64)
    fed = torch.arange(11)[None] < torch.tensor([11, 4, 7])[:, None]
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 22, 32, generator=draw).to(device, torch.bfloat16) for heads in (4, 2, 2)
    )
    outputs = []
    for make_inputs in (flash_rows_inputs, packed_inputs):
        plan = make_inputs(ids, fed, device)[0]["packed"]
        module = torch.nn.Identity()
        outputs.append(
            packed_attention(module, query, key, value, None, packed=plan, sliding_window=window)[0]
        )
    assert outputs[0].shape == outputs[1].shape == (1, 22, 4, 32)
    assert relative_error(outputs[0].float(), outputs[1].float()) < 1e-2


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
