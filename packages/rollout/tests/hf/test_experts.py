"""What the routers of a mixture chose, as completions tell it: beside one plain forward pass of each."""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from offbeat_rollout import ConfigError, Finish, GenerateRequest, RolloutConfig, SamplingParams, adapter_class
from offbeat_rollout.errors import CompletionError, UpdateRefused
from offbeat_rollout.hf import HfEngine
from offbeat_rollout.hf.cache import Recorder
from offbeat_rollout.testing import ScriptedRollout, make_tiny_model, reference_logprobs

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
    none = whole.cut(0, Finish.ABORT)
    assert none.followed_by(whole) == whole, "what has no tokens takes nothing away"
    assert np.array_equal(begun.followed_by(none).routed_experts, begun.routed_experts)
    with pytest.raises(CompletionError, match="routed_experts"):
        replace(whole, routed_experts=whole.routed_experts[:3])


def test_who_cannot_tell_says_so(tmp_path):
    path = make_tiny_model(tmp_path / "dense")
    for name in ("hf", "vllm", "sglang"):
        adapter = adapter_class(name)
        with pytest.raises(ConfigError, match="has no experts"):
            adapter.check(adapter.Config(model_path=path, record_experts=True))
    with pytest.raises(ConfigError, match=r"scripted: .*it does not say them"):
        ScriptedRollout.check(RolloutConfig(model_path=path, record_experts=True))
    with pytest.raises(ConfigError, match="no routers that tell what they choose"):
        Recorder(AutoModelForCausalLM.from_pretrained(path))


async def updated(path, version_of):
    """Return what an engine of `path` says after an update, and what it takes."""
    engine = HfEngine(RolloutConfig(model_path=path, max_model_len=128))
    await engine.start()
    try:
        updates = engine.weight_updates()
        specs = await updates.specs()
        tensors = list(load_file(f"{version_of}/model.safetensors").items())
        if not await updates.adopt(tensors, 1):
            await updates.load(tensors, 1)
        with pytest.raises(UpdateRefused, match=r"experts.3.*is missing"):
            await updates.load([(name, one) for name, one in tensors if ".experts.3." not in name], 2)
        return specs, await engine.generate_many(requests())
    finally:
        await engine.stop()


@pytest.mark.parametrize("family", [Qwen3MoeConfig, MixtralConfig])
def test_an_update_brings_experts_by_the_names_of_their_checkpoint(family, tmp_path):
    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3, "num_experts_per_tok": 2}
    own = (
        {"num_experts": 4, "moe_intermediate_size": 48}
        if family is Qwen3MoeConfig
        else {"num_local_experts": 4}
    )
    for name in ("old", "new"):
        torch.manual_seed(len(name) + ord(name[0]))
        AutoModelForCausalLM.from_config(family(**shape, **own, eos_token_id=None)).save_pretrained(
            tmp_path / name
        )
    specs, made = asyncio.run(updated(str(tmp_path / "old"), tmp_path / "new"))
    held = load_file(tmp_path / "new" / "model.safetensors")
    assert {(name, size) for name, size, _ in specs} == {
        (name, tuple(one.shape)) for name, one in held.items()
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32).eval()
    for request, completion in zip(requests(), made, strict=True):
        assert completion.policy_versions.tolist() == [1] * completion.num_tokens
        expected = reference_logprobs(
            model, request.prompt_ids, completion.token_ids.tolist(), request.sampling
        )
        assert completion.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
