"""Experts that a sampler recorded, replayed where its tokens are trained: two packages that do not know one another."""

import asyncio

import numpy as np
import pytest
import torch

from offbeat_engine import Dtype, ModelConfig, SftLoss, engine_class, engine_config_class, train_batch
from offbeat_engine.testing import make_tiny_model, run_ranks
from offbeat_rollout import GenerateRequest, RolloutConfig, SamplingParams, adapter_class

pytestmark = pytest.mark.spawns
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}


async def completions(config, requests):
    engine = adapter_class("hf")(config)
    await engine.start()
    try:
        return await engine.generate_many(requests)
    finally:
        await engine.stop()


def batch_of(requests, made):
    rows = [[*one.prompt_ids, *answer.token_ids.tolist()] for one, answer in zip(requests, made, strict=True)]
    longest = max(map(len, rows))
    ids, experts = (
        np.zeros((len(rows), longest), np.int64),
        np.full((len(rows), longest, made[0].routed_experts[0].size), -1, np.int16),
    )
    mask, logprobs = np.zeros(ids.shape, bool), np.zeros(ids.shape, np.float32)
    for row, (tokens, answer) in enumerate(zip(rows, made, strict=True)):
        ids[row, : len(tokens)] = tokens
        experts[row, : len(tokens) - 1] = answer.routed_experts.reshape(len(tokens) - 1, -1)
        mask[row, len(tokens) - answer.num_tokens : len(tokens)] = True
        logprobs[row][mask[row]] = answer.logprobs
    return train_batch(
        input_ids=torch.from_numpy(ids),
        lengths=torch.tensor([len(tokens) for tokens in rows]),
        loss_mask=torch.from_numpy(mask),
        rollout_logprobs=torch.from_numpy(logprobs),
        routed_experts=torch.from_numpy(experts),
    )


def scores(world, name, path, batches, dtype=Dtype.FLOAT32):
    torch.set_num_threads(1)
    config = engine_config_class(name)(model=ModelConfig(path=path), dtype=dtype)
    engine = engine_class(name)(config, world)
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    with engine.eval_mode():
        answers = [engine.forward_backward_step(batch, forward_only=True)[0]["logprobs"] for batch in batches]
    engine.close()
    return answers


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
def test_what_the_sampler_chose_gives_its_own_logprobs_and_other_experts_do_not(tmp_path, engine):
    path = make_tiny_model(tmp_path / "mixture", family="qwen3_moe", eos_token_id=None, **MIXTURE)
    requests = [
        GenerateRequest(
            request_id=str(n), prompt_ids=(5 + n, 6, 7), sampling=SamplingParams(max_tokens=4 + 5 * n, seed=n)
        )
        for n in range(4)
    ]
    made = asyncio.run(completions(RolloutConfig(model_path=path, record_experts=True), requests))
    recorded = batch_of(requests, made)
    other = recorded.clone()
    some = other["routed_experts"] >= 0
    other["routed_experts"][some] = (other["routed_experts"][some] + 1) % 4
    same, changed, chosen = run_ranks(
        scores, 1, engine, path, [recorded, other, recorded.exclude("routed_experts")], timeout_s=600.0
    )[0]
    torch.testing.assert_close(same, recorded["rollout_logprobs"], atol=1e-5, rtol=0)
    torch.testing.assert_close(same, chosen, atol=1e-5, rtol=0)
    assert (changed - same).abs().max() > 0.01


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
def test_in_bfloat16_routers_choose_otherwise_and_what_they_chose_brings_the_logprobs_together(
    tmp_path, engine
):
    """What replay is for: rounding tips a router that was undecided, and from there on it is another model."""
    shape = {**MIXTURE, "num_experts": 16, "initializer_range": 0.05}
    path = make_tiny_model(tmp_path / "mixture", family="qwen3_moe", eos_token_id=None, **shape)
    requests = [
        GenerateRequest(
            request_id=str(n),
            prompt_ids=tuple(5 + n * place % 50 for place in range(1, 9)),
            sampling=SamplingParams(max_tokens=40, seed=n),
        )
        for n in range(48)
    ]
    told = RolloutConfig(model_path=path, record_experts=True, dtype="bfloat16")
    recorded = batch_of(requests, asyncio.run(completions(told, requests)))
    batches = [recorded, recorded.exclude("routed_experts")]
    answers = run_ranks(scores, 1, engine, path, batches, Dtype.BFLOAT16, timeout_s=600.0)[0]
    with_them, without = (
        (one - recorded["rollout_logprobs"])[recorded["loss_mask"]].abs() for one in answers
    )
    assert without.mean() > 1.2 * with_them.mean()
    assert without.quantile(0.99) > 2 * with_them.quantile(0.99)
    assert without.max() > 5 * with_them.max()
