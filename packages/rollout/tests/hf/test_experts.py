"""What the routers of a mixture chose, as completions tell it: beside one plain forward pass of each."""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from offbeat_rollout import ConfigError, Finish, GenerateRequest, RolloutConfig, SamplingParams, adapter_class
from offbeat_rollout.errors import CompletionError
from offbeat_rollout.hf import HfEngine
from offbeat_rollout.testing import make_tiny_model

LAYERS, TOP_K = 3, 2


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"num_experts": 6, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(
        vocab_size=96,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        initializer_range=0.3,
        **shape,
        **experts,
    )
    path = tmp_path_factory.mktemp("models") / "mixture"
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return str(path)


def requests():
    prompts = [(5, 6, 7, 8), (5, 6, 7, 8), (9,), tuple(range(10, 31))]
    return [
        GenerateRequest(
            request_id=str(number),
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=3 + 4 * number, seed=number),
        )
        for number, prompt in enumerate(prompts)
    ]


async def generated(config):
    engine = HfEngine(config)
    await engine.start()
    try:
        return await engine.generate_many(requests())
    finally:
        await engine.stop()


def test_completions_tell_the_experts_of_every_token_that_was_fed(mixture):
    made = asyncio.run(generated(RolloutConfig(model_path=mixture, max_model_len=128, record_experts=True)))
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    for request, completion in zip(requests(), made, strict=True):
        ids = [*request.prompt_ids, *completion.token_ids[:-1].tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        expected = torch.stack([one.topk(TOP_K, -1).indices for one in logits], 1)
        assert completion.routed_experts.shape == (len(ids), LAYERS, TOP_K)
        assert np.array_equal(np.sort(completion.routed_experts), np.sort(expected.numpy()))


def test_they_are_cut_joined_and_sent_with_their_completion(mixture):
    whole = asyncio.run(generated(RolloutConfig(model_path=mixture, max_model_len=128, record_experts=True)))[
        3
    ]
    again = pickle.loads(pickle.dumps(whole))
    assert again == whole
    assert np.array_equal(again.routed_experts, whole.routed_experts)
    assert replace(whole, routed_experts=None) != whole
    begun = whole.cut(2, Finish.ABORT)
    assert len(begun.routed_experts) == 21 + 1
    assert whole.cut(0, Finish.ABORT).routed_experts is None
    other = np.where(np.arange(len(whole.routed_experts))[:, None, None] < 22, 0, whole.routed_experts)
    rest = replace(
        whole,
        token_ids=whole.token_ids[2:],
        logprobs=whole.logprobs[2:],
        spans=tuple(span._replace(end=span.end - 2) for span in whole.spans),
        routed_experts=other.astype(np.int16),
    )
    assert begun.followed_by(rest) == whole
    with pytest.raises(CompletionError, match="routed_experts"):
        replace(whole, routed_experts=whole.routed_experts[:3])


def test_who_cannot_tell_says_so(tmp_path):
    config = RolloutConfig(model_path=make_tiny_model(tmp_path / "dense"), record_experts=True)
    with pytest.raises(ConfigError, match="has no routers"):
        asyncio.run(generated(config))
    for name, says in (("vllm", "Triton"), ("sglang", "not tried")):
        adapter = adapter_class(name)
        with pytest.raises(ConfigError, match=says):
            adapter.check(adapter.Config(model_path=config.model_path, record_experts=True))
