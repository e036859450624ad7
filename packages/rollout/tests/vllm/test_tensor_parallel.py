"""One vLLM engine on two ranks: what it says is what one rank says, before and after an update."""

from __future__ import annotations

import os

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from offbeat_rollout import GenerateRequest, SamplingParams
from offbeat_rollout.testing import make_tiny_model, reference_logprobs
from offbeat_rollout.vllm import VllmConfig, VllmEngine, vllm_environment

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two models whose heads of keys and values can be shared by two ranks."""
    shape = {"num_key_value_heads": 2, "tie_word_embeddings": False}
    return [
        make_tiny_model(tmp_path_factory.mktemp("model") / str(seed), seed=seed, **shape) for seed in (0, 1)
    ]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(paths, file_backend):
    config = VllmConfig(
        model_path=paths[0],
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_gib=0.25,
        tensor_parallel_size=2,
        weight_backend=file_backend,
    )
    saved = dict(os.environ)
    cores = sorted(os.sched_getaffinity(0))
    os.environ.update(vllm_environment(config, cores if len(cores) > 1 else ()))
    engine = VllmEngine(config)
    await engine.start()
    yield engine
    await engine.stop()
    os.environ.clear()
    os.environ.update(saved)


async def check(engine, path, version):
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    requests = [
        GenerateRequest(
            request_id=f"{version}-{seed}",
            prompt_ids=tuple(range(3, 8 + 9 * seed)),
            sampling=SamplingParams(max_tokens=40, seed=seed, temperature=0.9),
        )
        for seed in range(6)
    ]
    for asked, done in zip(requests, await engine.generate_many(requests), strict=True):
        expected = reference_logprobs(model, asked.prompt_ids, done.token_ids.tolist(), asked.sampling)
        assert max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)) <= 1e-4
        assert set(done.policy_versions) == {version}


async def test_two_ranks_say_what_the_reference_says_before_and_after_an_update(engine, paths):
    await check(engine, paths[0], 0)
    updates = engine.weight_updates()
    names = [name for name, _, _ in await updates.specs()]
    await updates.begin()
    await updates.update({"path": f"{paths[1]}/model.safetensors", "expected": names})
    await updates.finish(1)
    await check(engine, paths[1], 1)
