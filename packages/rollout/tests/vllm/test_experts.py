"""A mixture of experts in a real vLLM engine on CPU that tells where each token went."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from offbeat_rollout import ConfigError, Finish, PauseMode
from offbeat_rollout.testing import (
    Subject,
    reference_experts,
    reference_logprobs,
    rollout_contract,
    wait_for_tokens,
)
from offbeat_rollout.vllm import VllmConfig, VllmEngine, vllm_environment

pytestmark = pytest.mark.vllm

VOCAB = 96
CHECKS = (
    "routed_experts",
    "pause_abort",
    *(
        pytest.param(one, marks=pytest.mark.deep)
        for one in rollout_contract
        if one not in ("routed_experts", "pause_abort", "top_logprobs", "stop_strings")
    ),
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two mixtures of one shape."""
    shape = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, initializer_range=0.2, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=32, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    made = [str(tmp_path_factory.mktemp("model") / name) for name in ("old", "new")]
    for seed, path in enumerate(made):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(shape).save_pretrained(path)
    return made


def settings(path, **changes):
    return VllmConfig(
        **{
            "model_path": path,
            "max_model_len": 512,
            "max_num_seqs": 64,
            "kv_cache_gib": 0.25,
            "record_experts": True,
            **changes,
        }
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(paths, file_backend):
    config = settings(paths[0], weight_backend=file_backend)
    saved = dict(os.environ)
    os.environ.update(vllm_environment(config))
    engine = VllmEngine(config)
    await engine.start()
    yield engine
    await engine.stop()
    os.environ.clear()
    os.environ.update(saved)


def subject_of(engine, path):
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    return Subject(
        engine=engine,
        vocab_size=VOCAB,
        logprobs=lambda prompt, tokens, sampling: reference_logprobs(model, prompt, tokens, sampling),
        experts=lambda ids: reference_experts(model, ids),
    )


@pytest.mark.parametrize("check", CHECKS)
async def test_contract(check, engine, paths):
    await rollout_contract[check](subject_of(engine, paths[0]))


@pytest.mark.parametrize("recompute_kv", [False, True])
async def test_tokens_keep_the_experts_that_they_were_sampled_by(engine, paths, recompute_kv):
    """An update in the middle of a completion: what was made before it was routed by the old weights, and stays so."""
    asked = subject_of(engine, paths[0]).request(max_tokens=300, seed=3)
    running = asyncio.create_task(engine.generate(asked))
    await wait_for_tokens(engine, 5)
    await engine.pause(PauseMode.KEEP)
    before, updates = engine.version, engine.weight_updates()
    names = [name for name, *_ in await updates.specs()]
    await updates.begin()
    await updates.update({"path": f"{paths[(before + 1) % 2]}/model.safetensors", "expected": names})
    await updates.finish(before + 1, recompute_kv=recompute_kv)
    await engine.resume()
    done = await running
    assert done.finish is Finish.LENGTH
    assert [span.version for span in done.spans] == [before, before + 1]
    made = done.spans[0].end
    fed = (*asked.prompt_ids, *done.token_ids[:-1].tolist())
    assert len(done.routed_experts) == len(fed)
    old = reference_experts(AutoModelForCausalLM.from_pretrained(paths[before % 2]).eval(), fed)
    first = len(asked.prompt_ids) + made - 1
    assert np.array_equal(np.sort(done.routed_experts[:first]), np.sort(old[:first]))
    assert not np.array_equal(np.sort(done.routed_experts[first:]), np.sort(old[first:]))


def test_what_cannot_be_recorded_is_refused(paths):
    for changes, words in (
        ({"device": "cuda"}, "Model Runner V2"),
        ({"prefix_caching": True}, "`prefix_caching`"),
        ({"engine_args": {"worker_extension_cls": "a.B"}}, "`record_experts` has one"),
    ):
        with pytest.raises(ConfigError, match=words):
            VllmEngine.check(settings(paths[0], **changes))
    with pytest.raises(ConfigError, match="set `record_experts`"):
        VllmEngine.check(
            settings(paths[0], record_experts=False, engine_args={"enable_return_routed_experts": True})
        )
