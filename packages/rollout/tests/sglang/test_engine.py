"""One real SGLang server on CPU, through the contract and weight updates."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat_rollout import (
    EngineStateError,
    Finish,
    GenerateRequest,
    PauseMode,
    RequestError,
    SamplingParams,
    UpdateRefused,
)
from offbeat_rollout.sglang import SglangConfig, SglangEngine
from offbeat_rollout.sglang.client import Client
from offbeat_rollout.testing import (
    Subject,
    make_tiny_model,
    reference_logprobs,
    rollout_contract,
    wait_for_tokens,
    write_tokenizer,
)

pytestmark = [pytest.mark.vllm, pytest.mark.sglang]

VOCAB = 96
CONTEXT = 1024
LONG = 1000  # tokens of what is still under way when something happens to it
# Each check once for all engines; what only SGLang does in its own way runs here in every tier, the rest under --deep.
USUAL = (
    "logprobs",
    "top_logprobs",
    "stop_tokens",
    "seeds",
    "refusals",
    "stop_strings",
    "context_end",
    "pause_keep",
    "pause_abort",
)
CHECKS = [pytest.param(one, marks=() if one in USUAL else pytest.mark.deep) for one in rollout_contract]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    made = [
        make_tiny_model(
            tmp_path_factory.mktemp("model") / str(seed),
            seed=seed,
            tie_word_embeddings=False,
            max_position_embeddings=CONTEXT,
        )
        for seed in (0, 1)
    ]
    write_tokenizer(made[0])
    return made


def settings(path):
    return SglangConfig(
        model_path=path,
        max_model_len=CONTEXT,
        max_num_seqs=64,
        kv_cache_gib=0.25,
        stop_strings=True,
        start_timeout_s=600,
    )


def subject_of(engine, path):
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    return Subject(
        engine=engine,
        vocab_size=VOCAB,
        logprobs=lambda prompt, tokens, sampling: reference_logprobs(model, prompt, tokens, sampling),
        same_bits=False,
        decode=AutoTokenizer.from_pretrained(path).decode,
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(paths):
    engine = SglangEngine(settings(paths[0]))
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(scope="module")
def subject(engine, paths):
    return subject_of(engine, paths[0])


def request(name, max_tokens=8, prompt=(3, 4, 5), **sampling):
    return GenerateRequest(
        request_id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, **sampling)
    )


@pytest.mark.parametrize("check", CHECKS)
async def test_contract(check, subject):
    await rollout_contract[check](subject)


def left_by(probs, top_k, top_p):
    """Return which tokens are left: `top_p` of all tokens, as SGLang, and of the `top_k` likeliest, as the other adapters."""
    order = probs.argsort(descending=True)[:top_k].tolist()
    found = []
    for whole in (1.0, float(probs[order].sum())):
        before = [float(probs[order[:place]].sum()) / whole for place in range(top_k)]
        found.append({token for token, mass in zip(order, before, strict=True) if mass < top_p})
    return found


async def test_beside_top_k_sglang_takes_top_p_of_all_tokens_which_is_why_it_is_refused(engine, paths):
    """Should this fail because SGLang does as the others do, the two can be given at once."""
    prompt, cuts = [3, 4, 5], {"top_k": 6, "top_p": 0.7}
    sampling = {"max_new_tokens": 24, "temperature": 1.5, "sampling_seed": 1, **cuts}
    asked = {
        "input_ids": prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "return_sampling_mask": True,
    }
    said = await engine._client().post("/generate", asked)
    model, whole = AutoModelForCausalLM.from_pretrained(paths[0]).eval(), [*prompt, *said["output_ids"]]
    with torch.no_grad():
        probs = (model(torch.tensor([whole])).logits[0, len(prompt) - 1 : -1] / 1.5).softmax(-1)
    masks = [set(mask) for mask in said["meta_info"]["output_token_sampling_mask"]]
    of_all, of_likeliest = zip(*(left_by(one, **cuts) for one in probs), strict=True)
    assert masks == list(of_all)
    assert masks != list(of_likeliest)


async def test_what_sglang_would_not_do_as_it_is_asked_is_refused(engine):
    with pytest.raises(
        RequestError, match=r"'p': `top_k` is 4 and `top_p` 0\.9: SGLang takes `top_p` of all"
    ):
        await engine.generate(request("p", top_p=0.9, top_k=4))
    with pytest.raises(RequestError, match="request id 'twice' came twice"):
        await engine.generate_many([request("twice"), request("twice")])


async def test_ids_that_begin_alike_are_aborted_apart(engine):
    """SGLang ends every request whose name begins with the one it is given."""
    one, ten = (asyncio.create_task(engine.generate(request(name, LONG, seed=1))) for name in ("q1", "q10"))
    await wait_for_tokens(engine, 40)
    await engine.abort(["q1"])
    assert (await one).finish is Finish.ABORT
    assert ((await ten).finish, (await ten).num_tokens) == (Finish.LENGTH, LONG)


@pytest.mark.deep
async def test_a_connection_that_nobody_used_for_a_while_is_there_for_the_next_request(engine):
    """By itself SGLang closes it after 5 s, also in the face of a request that comes then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine._server.port)
    call = (
        f"GET /model_info HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {engine._server.key}\r\n\r\n"
    )
    for idle_s in (7, 0):
        writer.write(call.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = re.findall(rb"content-length: (\d+)", head.lower())
        await reader.readexactly(int(length))
        await asyncio.sleep(idle_s)
    writer.close()


def gaps(path, done):
    """Return how far each log-prob is from that of the model in `path` on everything before it."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    expected = reference_logprobs(model, (3, 4, 5), done.token_ids.tolist(), SamplingParams(max_tokens=LONG))
    return [abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)]


@pytest.fixture(scope="module")
def load(load_folder):
    return load_folder


async def rests(engine, name, seed):
    """Return a request of `LONG` tokens that rests in a pause with some of them made.

    On a busy machine the server may have made all of them before it hears of the pause: then it is asked for others.
    """
    while True:
        task = asyncio.create_task(engine.generate(request(name, LONG, seed=seed)))
        await wait_for_tokens(engine, 20)
        await engine.pause(PauseMode.KEEP)
        if not (await asyncio.wait([task], timeout=2))[0]:
            return task
        await engine.resume()


@pytest.mark.parametrize(("version", "recompute"), [(1, False), (2, True)])
async def test_new_weights_in_the_middle_of_a_completion(engine, paths, load, version, recompute):
    """After the first round the server holds the second model, after the second round the first again."""
    target, served = paths[version % 2], engine.version
    long = await rests(engine, f"long{version}", seed=1)
    await load(engine, target, version, recompute_kv=recompute)
    await engine.resume()
    done = await long
    assert (done.finish, done.num_tokens) == (Finish.LENGTH, LONG)
    flip = done.policy_versions.tolist().index(version)
    assert list(done.policy_versions) == [served] * flip + [version] * (LONG - flip)
    assert 0 < flip < LONG
    assert max(gaps(paths[served % 2], done)[:flip]) <= 1e-4
    # After the flip: the new weights' on the whole prefix if keys and values are computed anew, else on older ones.
    after = max(gaps(target, done)[flip:])
    assert after <= 1e-4 if recompute else after > 1e-2
    fresh = await engine.generate(request("fresh", 40, seed=2))
    assert max(gaps(target, fresh)) <= 1e-4
    assert set(fresh.policy_versions) == {version} == {engine.version}


async def test_what_comes_in_a_pause_begins_with_the_weights_that_are_there_then(engine, paths, load):
    await engine.pause(PauseMode.KEEP)
    waiting, doomed = (asyncio.create_task(engine.generate(request(name, 20, seed=3))) for name in ("w", "d"))
    await asyncio.sleep(0.05)
    await engine.abort(["d"])
    assert ((await doomed).finish, (await doomed).num_tokens) == (Finish.ABORT, 0)
    await load(engine, paths[1], 3)
    assert (await engine.health()).paused, "an update in a pause does not end it"
    assert not waiting.done()
    await engine.resume()
    assert set((await waiting).policy_versions) == {3}
    assert max(gaps(paths[1], await waiting)) <= 1e-4


async def test_in_a_pause_a_request_is_ended_at_once_with_what_it_has(engine):
    task = await rests(engine, "kept", seed=4)
    await engine.abort(["kept"])
    done = await asyncio.wait_for(task, 600)
    assert done.finish is Finish.ABORT
    assert 20 <= done.num_tokens < LONG
    await engine.resume()
    again = await engine.generate(request("again", LONG, seed=4))
    assert done.token_ids.tolist() == again.token_ids[: done.num_tokens].tolist()


async def test_a_load_that_fails_ends_the_engine_and_all_that_wait_for_it(engine, paths, load):
    under_way = asyncio.create_task(engine.generate(request("under way", LONG)))
    await wait_for_tokens(engine)
    await engine.pause(PauseMode.KEEP)
    waiting = asyncio.create_task(engine.generate(request("waiting")))
    await asyncio.sleep(0.05)

    async def torn():
        raise RuntimeError("half of it is there")

    with pytest.raises(RuntimeError, match="half of it"):
        await engine.weight_updates().load(torn, 4)
    health = await engine.health()
    assert (health.ok, health.paused) == (False, True)
    with pytest.raises(EngineStateError, match="an update to version 4 failed while SGLang loaded it: half"):
        await engine.generate(request("torn"))
    for task in (under_way, waiting):
        with pytest.raises(EngineStateError, match="an update to version 4 failed while SGLang loaded it"):
            await asyncio.wait_for(task, 600)
    engine._requests.failure = ""  # for the next tests: nobody else can make it whole
    await load(engine, paths[0], 4)
    await engine.resume()
    assert max(gaps(paths[0], await engine.generate(request("whole", 20)))) <= 1e-4


async def test_a_server_that_does_not_come_to_rest_is_told_to_load_nothing(engine, paths, monkeypatch):
    """What is planted: it refuses to pause."""
    post, loads = Client.post, []

    async def fail(self, path, body=None):
        if path == "/pause_generation":
            raise EngineStateError("planted")
        return await post(self, path, body)

    async def load():
        loads.append(1)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "post", fail)
        with pytest.raises(UpdateRefused, match="did not come to rest for version 5: planted"):
            await engine.weight_updates().load(load, 5)
    assert (loads, engine.version) == ([], 4)
    assert max(gaps(paths[0], await engine.generate(request("whole", 20)))) <= 1e-4


async def test_a_killed_server_is_known_at_once_and_nothing_of_it_is_left(engine):
    """The last test of this file."""
    keeper = engine._server._keeper.pid
    (main,) = children(keeper)
    group = [main, *children(main)]
    assert len(group) >= 2, "the server has a scheduler"
    task = asyncio.create_task(engine.generate(request("lost", LONG)))
    await wait_for_tokens(engine)
    os.kill(main, signal.SIGKILL)
    with pytest.raises(EngineStateError, match="SGLang"):
        await asyncio.wait_for(task, 600)
    async with asyncio.timeout(600):
        while (await engine.health()).ok:  # noqa: ASYNC110 processes are looked at
            await asyncio.sleep(0.05)
    with pytest.raises(EngineStateError, match="the server ended"):
        await engine.generate(request("none"))
    folders = [each.path for each in engine._server._folders]
    await engine.stop()
    assert not any(alive(pid) for pid in group)
    assert not any(there(folder) for folder in folders)


def children(pid):
    said = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in said.stdout.split()]


def there(folder):
    return Path(folder).exists()


def alive(pid):
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False
