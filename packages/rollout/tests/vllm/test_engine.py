"""One real vLLM engine on CPU, through the contract and a weight update.

The update comes through the backend of conftest.py.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import tempfile

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat_rollout import (
    ConfigError,
    EngineStateError,
    Finish,
    GenerateRequest,
    PauseMode,
    RequestTimeout,
    SamplingParams,
    UpdateRefused,
)
from offbeat_rollout.testing import (
    Subject,
    make_tiny_model,
    reference_logprobs,
    rollout_contract,
    wait_for_tokens,
    write_tokenizer,
)
from offbeat_rollout.toolkit.clock import RequestClock, Work
from offbeat_rollout.vllm import VllmConfig, VllmEngine, vllm_environment
from offbeat_rollout.vllm.processes import Forked

# vLLM leaves a message-queue context to the garbage collector; it is collected in the last tests of this file.
pytestmark = pytest.mark.vllm

VOCAB = 96


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    made = [
        make_tiny_model(tmp_path_factory.mktemp("model") / str(seed), seed=seed, tie_word_embeddings=False)
        for seed in (0, 1)
    ]
    write_tokenizer(made[0])
    return made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(paths, file_backend):
    config = VllmConfig(
        model_path=paths[0],
        max_model_len=512,
        max_num_seqs=256,
        kv_cache_gib=0.25,
        prefix_caching=True,
        stop_strings=True,
        weight_backend=file_backend,
    )
    saved, temporary = dict(os.environ), tempfile.tempdir
    os.environ.update(vllm_environment(config))
    tempfile.tempdir = tempfile.mkdtemp()
    engine = VllmEngine(config)
    await engine.start()
    yield engine
    await engine.stop()
    os.rmdir(tempfile.tempdir)
    tempfile.tempdir = temporary
    os.environ.clear()
    os.environ.update(saved)


@pytest.fixture(scope="module")
def subject(engine, paths):
    model = AutoModelForCausalLM.from_pretrained(paths[0]).eval()
    return Subject(
        engine=engine,
        vocab_size=VOCAB,
        logprobs=lambda prompt, tokens, sampling: reference_logprobs(model, prompt, tokens, sampling),
        decode=AutoTokenizer.from_pretrained(paths[0]).decode,
    )


def request(name, max_tokens=8, prompt=(3, 4, 5), **sampling):
    return GenerateRequest(
        request_id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, **sampling)
    )


@pytest.mark.parametrize("check", rollout_contract)
async def test_contract(check, subject):
    await rollout_contract[check](subject)


async def test_log_probs_are_those_of_the_truncated_distribution(subject):
    requests = [
        request(f"p{i}", 20, seed=i, temperature=0.7, top_p=0.8, top_k=20 if i % 2 else -1) for i in range(8)
    ]
    for asked, done in zip(requests, await subject.engine.generate_many(requests), strict=True):
        expected = subject.logprobs(asked.prompt_ids, done.token_ids.tolist(), asked.sampling)
        assert max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)) <= 1e-4


async def test_a_request_out_of_time_fails_and_the_engine_is_well(engine, monkeypatch):
    ticks, held = itertools.count(), asyncio.Event()

    def look():
        """Tell of an engine that goes on making tokens, and of the request only once it gets no more of them."""
        at_work = engine._progress.work().at_work if held.is_set() else {}
        return Work(tokens_made=next(ticks), at_work=at_work)

    monkeypatch.setattr(engine, "_clock", RequestClock(0.02, look))
    late = asyncio.create_task(engine.generate(request("late", 500)))
    await wait_for_tokens(engine)
    await engine.pause(PauseMode.KEEP)
    held.set()
    with pytest.raises(RequestTimeout, match=r"'late' got no token in 0\.02 s"):
        await late
    monkeypatch.undo()
    await engine.resume()
    assert len((await engine.generate(request("next", 1))).token_ids) == 1
    health = await engine.health()
    assert (health.ok, health.num_running) == (True, 0)


async def test_many_seeded_prompts_beyond_one_step(engine):
    """vLLM on CPU dies of a seeded prompt that is computed in two steps; ours must never be."""
    requests = [request(f"m{i}", 2, tuple(1 + (i + j) % 90 for j in range(250)), seed=i) for i in range(100)]
    done = await engine.generate_many(requests)
    assert [completion.num_tokens for completion in done] == [2] * 100


async def test_specs_are_the_checkpoint_s(engine, paths):
    from safetensors.torch import load_file

    saved = load_file(f"{paths[0]}/model.safetensors")
    assert {name: (shape, dtype) for name, shape, dtype in await engine.weight_updates().specs()} == {
        name: (tuple(tensor.shape), "float32") for name, tensor in saved.items()
    }


async def update(engine, path, version, **finish):
    updates = engine.weight_updates()
    await updates.begin()
    names = [name for name, _, _ in await updates.specs()]
    await updates.update({"path": f"{path}/model.safetensors", "expected": names})
    await updates.finish(version, **finish)


async def test_a_refused_update_changes_nothing(engine, paths):
    before = await engine.generate(request("before", 20, seed=5))
    updates = engine.weight_updates()
    await updates.begin()
    with pytest.raises(UpdateRefused, match=r"unknown or missing: .*nonsense"):
        await updates.update({"path": f"{paths[1]}/model.safetensors", "expected": ["nonsense"]})
    after = await engine.generate(request("after", 20, seed=5))
    assert (after.token_ids.tolist(), after.logprobs.tolist()) == (
        before.token_ids.tolist(),
        before.logprobs.tolist(),
    )
    assert engine.version == 0
    with pytest.raises(EngineStateError, match="worker failed in `finish`"):
        await updates.finish(9)  # the refusal ended the session


async def test_a_failure_that_says_refused_is_no_refusal(engine, paths):
    updates = engine.weight_updates()
    await updates.begin()
    with pytest.raises(EngineStateError, match="Connection refused"):
        await updates.update({"path": f"{paths[0]}/model.safetensors", "expected": []})


LONG = tuple(2 + i % 89 for i in range(300))  # two blocks of keys and values, and some


async def cached(engine, asked):
    """Return how many tokens of the prompt vLLM had keys and values of."""
    return (await engine.generate(asked)).num_cached_tokens


async def test_a_prefix_is_computed_once_for_one_version_and_again_for_the_next(engine, paths):
    def model(version):
        return AutoModelForCausalLM.from_pretrained(paths[version % 2]).eval()

    async def check(done, prompt, version):
        expected = reference_logprobs(
            model(version), prompt, done.token_ids.tolist(), SamplingParams(max_tokens=40)
        )
        assert max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)) <= 1e-4
        assert set(done.policy_versions) == {version}

    assert await cached(engine, request("c0", 1, LONG)) == 0
    assert await cached(engine, request("c1", 1, LONG)) >= 128
    await check(await engine.generate(request("c2", 40, LONG, seed=1)), LONG, 0)

    # One request runs through the update and fills blocks after it; one arrives while nothing is scheduled.
    through = asyncio.create_task(engine.generate(request("through", 180, LONG, seed=1)))
    await wait_for_tokens(engine)
    await engine.pause(PauseMode.KEEP)
    waiting = asyncio.create_task(engine.generate(request("waiting", 40, LONG, seed=2)))
    doomed = asyncio.create_task(engine.generate(request("doomed", 40, LONG, seed=2)))
    await asyncio.sleep(0.1)
    await update(engine, paths[1], 1)
    await engine.abort(["doomed"])
    await engine.resume()
    assert (await doomed).finish is Finish.ABORT
    await check(await waiting, LONG, 1)
    done = await through
    assert set(done.policy_versions) == {0, 1}
    after = (*LONG, *done.token_ids.tolist())
    assert await cached(engine, request("c3", 1, after)) in range(128, 300), (
        "of `waiting`, nothing of `through`"
    )
    await check(await engine.generate(request("c4", 20, after, seed=3)), after, 1)

    await update(engine, paths[0], 0)  # a version that was there before is another update all the same
    assert await cached(engine, request("c5", 1, LONG)) == 0


def gaps(path, done):
    """Return how far each log-prob is from that of the model in `path` on everything before it."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    expected = reference_logprobs(model, (3, 4, 5), done.token_ids.tolist(), SamplingParams(max_tokens=250))
    return [abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)]


@pytest.mark.parametrize(("version", "recompute"), [(3, False), (4, True)])
async def test_new_weights_in_the_middle_of_a_completion(engine, paths, version, recompute):
    """After the first round the engine serves the second model, after the second round the first again."""
    target = paths[version % 2]
    served = engine.version
    long = asyncio.create_task(engine.generate(request(f"long{version}", 250, seed=1)))
    await wait_for_tokens(engine)
    await engine.pause(PauseMode.KEEP)
    await update(engine, target, version, recompute_kv=recompute)
    await engine.resume()
    done = await long
    assert done.finish is Finish.LENGTH
    assert done.num_tokens == 250
    flip = done.policy_versions.tolist().index(version)
    assert list(done.policy_versions) == [served] * flip + [version] * (250 - flip)
    assert 0 < flip < 250
    assert engine.version == version
    # Before the flip the log-probs are the old weights'; after it the new ones' on the whole prefix, if computed anew.
    assert max(gaps(paths[served % 2], done)[:flip]) <= 1e-4
    after = max(gaps(target, done)[flip:])
    assert after <= 1e-4 if recompute else after > 1e-2
    fresh = await engine.generate(request(f"fresh{version}", 12, seed=2))
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    expected = reference_logprobs(model, (3, 4, 5), fresh.token_ids.tolist(), SamplingParams(max_tokens=12))
    assert max(abs(a - b) for a, b in zip(fresh.logprobs, expected, strict=True)) <= 1e-4
    assert set(fresh.policy_versions) == {version}


async def test_discarded_weights_have_no_version_and_are_not_served(engine, paths):
    await engine.sleep(2)
    await engine.wake()
    assert engine.version is None
    assert (await engine.health()).version is None
    for call in (engine.generate(request("none")), engine.generate_many([request("none")])):
        with pytest.raises(EngineStateError, match=r"discarded \(`sleep\(2\)`\)"):
            await call
    await update(engine, paths[0], 6)
    assert set((await engine.generate(request("some"))).policy_versions) == {6}


async def test_stop_leaves_no_process_and_no_socket(engine):
    """Last in the file: the engine is gone afterwards."""
    children = multiprocessing.active_children()
    assert [type(child) for child in children] == [Forked], "vLLM is imported once"
    assert os.listdir(tempfile.gettempdir()), "the folder of its sockets"
    await engine.stop()
    assert not any(child.is_alive() for child in children)
    assert not os.listdir(tempfile.gettempdir())
    assert not (await engine.health()).ok
    with pytest.raises(EngineStateError, match="call `start` first"):
        await engine.generate(request("late"))


async def test_a_head_dimension_vllm_has_no_kernel_for_is_refused_at_start(tmp_path, engine):
    path = make_tiny_model(tmp_path, hidden_size=48)
    with pytest.raises(ConfigError, match="head dimension of 24"):
        await VllmEngine(VllmConfig(model_path=path, max_model_len=64, weight_backend="file")).start()
