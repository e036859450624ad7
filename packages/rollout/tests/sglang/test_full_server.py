"""One real SGLang server on CPU as GPUs have it: scheduling overlaps, and keys and values of few requests have room at once."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from offbeat_rollout import EngineStateError, Finish, GenerateRequest, PauseMode, SamplingParams
from offbeat_rollout.sglang import SglangConfig, SglangEngine
from offbeat_rollout.sglang.client import Client
from offbeat_rollout.testing import make_tiny_model, reference_logprobs, wait_for_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.sglang]

PROMPT = (3, 4, 5)
OPEN = ("/health", "/ready", "/metrics")  # SGLang asks nobody for a key there


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return [
        make_tiny_model(tmp_path_factory.mktemp("model") / str(seed), seed=seed, tie_word_embeddings=False)
        for seed in (0, 1)
    ]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(paths):
    engine = SglangEngine(
        SglangConfig(
            model_path=paths[0],
            max_model_len=256,
            max_num_seqs=64,
            kv_cache_gib=0.0001,
            start_timeout_s=600,
            server_args={"disable_overlap_schedule": False, "schedule_conservativeness": 0.05},
        )
    )
    await engine.start()
    yield engine
    await engine.stop()


def start(engine, names, max_tokens=230):
    """Start a request for each name."""
    return [
        asyncio.create_task(
            engine.generate(
                GenerateRequest(
                    request_id=name,
                    prompt_ids=PROMPT,
                    sampling=SamplingParams(max_tokens=max_tokens, seed=seed),
                )
            )
        )
        for seed, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def load(load_folder):
    """Return what loads the model whose turn a version is: the first where it is even, else the second."""
    return lambda engine, paths, version, **more: load_folder(engine, paths[version % 2], version, **more)


def gap(paths, done):
    """Return the largest difference between a log-prob and that of the model its version names, on all tokens before it."""
    if not done.num_tokens:
        return 0.0
    sampling = SamplingParams(max_tokens=done.num_tokens)
    by_model = [
        reference_logprobs(
            AutoModelForCausalLM.from_pretrained(path).eval(), PROMPT, done.token_ids.tolist(), sampling
        )
        for path in paths
    ]
    named = zip(done.logprobs, done.policy_versions, strict=True)
    return max(abs(one - by_model[version % 2][place]) for place, (one, version) in enumerate(named))


def status(engine, method, path, body):
    """Return what the server answers to somebody without its key."""
    call = urllib.request.Request(
        f"{engine._server.url}{path}", body, {"Content-Type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(call, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


async def test_a_stranger_loads_no_weights_and_calls_nothing_else(engine, paths):
    other = json.dumps({"model_path": paths[1], "weight_version": "0"}).encode()
    assert await asyncio.to_thread(status, engine, "POST", "/update_weights_from_disk", other) == 401
    routes = (await engine._client().call("GET", "/openapi.json"))["paths"]
    calls = [(method.upper(), path) for path, methods in routes.items() for method in methods]
    said = {call: await asyncio.to_thread(status, engine, *call, b"{}") for call in calls}
    assert len(said) > 60
    assert {call for call, code in said.items() if code != 401} <= {
        call for call in calls if call[1].startswith(OPEN)
    }
    (done,) = await asyncio.gather(*start(engine, ["own"], 40))
    assert gap(paths, done) <= 1e-4


def test_the_key_is_in_no_list_of_processes(engine):
    words = b"".join(
        path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists()
    )
    assert str(engine._server.port).encode() in words
    assert engine._server.key.encode() not in words


async def test_every_token_is_of_the_version_that_names_it_though_scheduling_overlaps(engine, paths, load):
    """Where the machine is busy all requests may be done before the server rests: then it is tried again."""
    for turn in range(20):
        tasks = start(engine, [f"overlap{turn}-{number}" for number in range(8)], 60)
        await wait_for_tokens(engine, 60)
        version = engine.version
        await engine.pause(PauseMode.KEEP)
        await load(engine, paths, version + 1)
        await engine.resume()
        found = await asyncio.gather(*tasks)
        assert {done.finish for done in found} == {Finish.LENGTH}
        assert max(gap(paths, done) for done in found) <= 1e-4
        if any(len(done.spans) == 2 for done in found):
            return
    pytest.fail("no request was under way when the server rested, in 20 turns")


async def test_aborts_and_updates_at_once_lose_neither_a_replica_nor_a_version(engine, paths, load):
    """Requests wait for room with tokens already: SGLang retracts them, and answers their abort in another way."""
    for turn in range(4):
        version, names = engine.version + 1, [f"full{turn}-{number}" for number in range(24)]
        tasks = start(engine, names)
        await wait_for_tokens(engine, 200 + 300 * turn)
        await asyncio.gather(
            load(engine, paths, version, recompute_kv=turn % 2 == 1), engine.abort(names[::3])
        )
        await wait_for_tokens(engine, 400)
        await engine.abort(names[1::3])
        await wait_for_tokens(engine, 200)
        await engine.abort(names)
        found = await asyncio.gather(*tasks)
        assert max(gap(paths, done) for done in found) <= 1e-4
        assert any([span.version for span in done.spans] == [version - 1, version] for done in found)
    assert (await engine.health()).ok


async def test_two_updates_at_once_come_one_after_the_other(engine, paths, load):
    version = engine.version
    await asyncio.gather(load(engine, paths, version + 1), load(engine, paths, version + 2))
    assert engine.version == version + 2
    (done,) = await asyncio.gather(*start(engine, ["after"], 40))
    assert set(done.policy_versions) == {version + 2}
    assert gap(paths, done) <= 1e-4


async def test_a_pause_that_fails_half_way_lets_the_server_go_on(engine, monkeypatch):
    """What is planted: the server is paused, and the look whether it has come to rest fails."""
    (task,) = start(engine, ["half"])
    await wait_for_tokens(engine, 10)
    post = Client.post

    async def fail(self, path, body=None):
        if path == "/weights_checker":
            raise EngineStateError("planted")
        return await post(self, path, body)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "post", fail)
        with pytest.raises(EngineStateError, match="planted"):
            await engine.pause(PauseMode.KEEP)
    done = await asyncio.wait_for(task, 120)
    assert (done.finish, done.num_tokens) == (Finish.LENGTH, 230)
