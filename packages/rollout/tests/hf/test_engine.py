from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat_rollout import (
    ConfigError,
    EngineStateError,
    Finish,
    GenerateRequest,
    PauseMode,
    RequestError,
    RolloutConfig,
    SamplingParams,
    UpdateRefused,
)
from offbeat_rollout.hf import HfEngine, worker
from offbeat_rollout.testing import make_tiny_model, reference_logprobs, wait_for_tokens


def request(name, max_tokens=8, **sampling):
    return GenerateRequest(
        request_id=name, prompt_ids=(3, 4, 5), sampling=SamplingParams(max_tokens=max_tokens, **sampling)
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return [make_tiny_model(tmp_path_factory.mktemp("model") / str(seed), seed=seed) for seed in (0, 1)]


@pytest_asyncio.fixture(loop_scope="module")
async def engine(paths):
    engine = HfEngine(RolloutConfig(model_path=paths[0], max_model_len=256))
    await engine.start()
    yield engine
    await engine.stop()


def weights(path):
    return load_file(f"{path}/model.safetensors")


async def test_specs_are_what_save_pretrained_writes(engine, paths):
    saved = weights(paths[0])
    assert {name: (shape, dtype) for name, shape, dtype in await engine.specs()} == {
        name: (tuple(tensor.shape), "float32") for name, tensor in saved.items()
    }
    assert "lm_head.weight" not in saved, "this model ties its head; the test means nothing otherwise"


async def test_new_weights_in_the_middle_of_a_completion(engine, paths):
    long = asyncio.create_task(engine.generate(request("long", 250, seed=1)))
    await wait_for_tokens(engine)
    await engine.load(weights(paths[1]).items(), 7)
    assert engine.version == 7
    done = await long
    assert done.finish is Finish.LENGTH
    assert set(done.policy_versions) == {0, 7}
    assert list(done.policy_versions) == sorted(done.policy_versions)
    # From here on the engine is the second model.
    fresh = await engine.generate(request("fresh", 12, seed=2))
    other = AutoModelForCausalLM.from_pretrained(paths[1]).eval()
    expected = reference_logprobs(other, (3, 4, 5), fresh.token_ids.tolist(), SamplingParams(max_tokens=12))
    assert max(abs(a - b) for a, b in zip(fresh.logprobs, expected, strict=True)) <= 1e-4
    assert set(fresh.policy_versions) == {7}


@pytest.mark.parametrize("recompute", [False, True])
async def test_after_a_flip_the_prefix_is_the_old_weights_or_computed_anew(engine, paths, recompute):
    long = asyncio.create_task(engine.generate(request("long", 250, seed=1)))
    await wait_for_tokens(engine)
    await engine.load(weights(paths[1]).items(), 7, recompute_kv=recompute)
    done = await long
    flip = done.policy_versions.tolist().index(7)
    assert list(done.policy_versions) == [0] * flip + [7] * (250 - flip)
    assert 0 < flip < 250
    old, new = (gaps(path, done) for path in paths)
    assert max(old[:flip]) <= 1e-4, "what came before the flip is the old weights'"
    if recompute:
        assert max(new[flip:]) <= 1e-4, "the new weights, on the whole prefix"
    else:
        assert max(new[flip:]) > 1e-2, "new weights over keys and values of the old ones"


def gaps(path, done):
    """Return how far each log-prob is from that of the model in `path` on everything before it."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    expected = reference_logprobs(model, (3, 4, 5), done.token_ids.tolist(), SamplingParams(max_tokens=250))
    return [abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)]


async def test_weights_are_taken_during_a_pause(engine, paths):
    await engine.pause(PauseMode.KEEP)
    await engine.load(weights(paths[1]).items(), 3)
    waiting = asyncio.create_task(engine.generate(request("waiting")))
    await engine.resume()
    assert set((await waiting).policy_versions) == {3}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update(extra=torch.zeros(1)), "extra is unknown"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(65)}),
            r"model.norm.weight has shape \(65,\), expected \(64,\)",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(64).bfloat16()}),
            "model.norm.weight has dtype bfloat16",
        ),
    ],
)
async def test_a_wrong_update_is_refused_by_name_and_changes_nothing(engine, paths, damage, named):
    before = await engine.generate(request("before", 20, seed=5))
    update = weights(paths[1])
    damage(update)
    with pytest.raises(UpdateRefused, match=named):
        await engine.load(update.items(), 1)
    after = await engine.generate(request("after", 20, seed=5))
    assert engine.version == 0
    assert (after.token_ids.tolist(), after.logprobs.tolist()) == (
        before.token_ids.tolist(),
        before.logprobs.tolist(),
    )
    with pytest.raises(UpdateRefused, match="came twice"):
        await engine.load([*weights(paths[1]).items()] * 2, 1)


async def test_sync_while_nothing_runs_takes_no_longer_than_a_moment(engine, paths):
    for version in (1, 2):
        await engine.load(weights(paths[version % 2]).items(), version)
        assert (await engine.health()).version == version


async def test_the_event_loop_stays_responsive(engine):
    work = asyncio.create_task(engine.generate_many([request(str(i), 100) for i in range(64)]))
    ticks = 0
    while not work.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert ticks >= 20


async def test_what_is_asked_for_in_one_turn_of_the_loop_joins_the_batch_together(engine, monkeypatch):
    monkeypatch.setattr(worker, "_IDLE_WAIT_S", 600.0)  # nothing else wakes the thread
    await engine.generate(request("first", 1))
    joined, join = [], engine._worker._batch.join
    monkeypatch.setattr(engine._worker._batch, "join", lambda rows: (joined.append(len(rows)), join(rows)))

    async def late(name):
        time.sleep(0.005)  # noqa: ASYNC251 the thread could run, as it may within a longer turn
        return await engine.generate(request(name))

    await asyncio.gather(*(late(f"{number}") for number in range(6)))
    assert joined == [6]


async def test_end_of_sequence_of_the_folder_ends_a_completion(tmp_path, paths):
    plain = HfEngine(RolloutConfig(model_path=paths[0], max_model_len=64))
    await plain.start()
    free = await plain.generate(request("free", 20, seed=1))
    await plain.stop()
    eos = int(free.token_ids[4])
    engine = HfEngine(RolloutConfig(model_path=make_tiny_model(tmp_path, eos_token_id=eos), max_model_len=64))
    await engine.start()
    done = await engine.generate(request("ended", 20, seed=1))
    await engine.stop()
    assert done.token_ids.tolist() == free.token_ids[: free.token_ids.tolist().index(eos) + 1].tolist()
    assert done.finish is Finish.STOP


async def test_calls_out_of_order(paths):
    engine = HfEngine(RolloutConfig(model_path=paths[0], max_model_len=64))
    with pytest.raises(EngineStateError, match="call `start` first"):
        await engine.generate(request("early"))
    await engine.stop()
    await engine.start()
    doomed = asyncio.create_task(engine.generate(request("doomed", 60)))
    await asyncio.sleep(0)
    await engine.stop()
    await engine.stop()
    with pytest.raises(EngineStateError, match="stopped"):
        await doomed
    with pytest.raises(EngineStateError, match="call `start` first"):
        await engine.generate(request("after"))
    await engine.start()  # a stopped engine can be started again
    assert (await engine.generate(request("again"))).num_tokens == 8
    await engine.sleep(1)
    with pytest.raises(EngineStateError, match="sleeps"):
        await engine.generate(request("tired"))
    await engine.wake()
    assert (await engine.generate(request("fresh"))).num_tokens == 8
    await engine.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_path": "/nowhere"}, "holds no config.json"),
        ({"max_model_len": 100_000}, "made for 512 positions"),
        ({"tensor_parallel_size": 2}, "no more than 1"),
        ({"max_num_seqs": 0}, "`max_num_seqs` must be >= 1"),
        ({"dtype": "float8"}, "dtype 'float8'"),
    ],
)
async def test_settings_it_cannot_honour_are_refused_at_start(paths, changes, message):
    engine = HfEngine(RolloutConfig(**{"model_path": paths[0], "max_model_len": 64, **changes}))
    with pytest.raises(ConfigError, match=message):
        await engine.start()
    assert not (await engine.health()).ok


def test_a_model_it_cannot_serve_is_refused_by_its_config_alone(tmp_path):
    from transformers import Lfm2Config

    Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"does not do \['conv'\]; use vllm"):
        HfEngine.check(HfEngine.Config(model_path=str(tmp_path)))


async def test_a_sliding_window_is_refused(tmp_path):
    path = make_tiny_model(tmp_path, use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(ConfigError, match="window of 16 tokens"):
        await HfEngine(RolloutConfig(model_path=path, max_model_len=64)).start()


TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}, "s_aux"),
        ("bart", {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4}, "leaves out: log-probs"),
    ],
)
async def test_a_model_that_would_generate_otherwise_than_its_plain_forward_is_refused_at_start(
    tmp_path, family, changes, named, dtype
):
    config = AutoConfig.for_model(family, **TINY, **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = HfEngine(RolloutConfig(model_path=str(tmp_path), max_model_len=64, dtype=dtype))
    with pytest.raises(ConfigError, match=f"{named}.*use vllm"):
        await engine.start()


async def test_a_request_by_the_id_of_one_that_was_given_up_gets_its_own_answer(engine):
    first = asyncio.create_task(engine.generate(request("same", 250, seed=1)))
    await wait_for_tokens(engine)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    done = await engine.generate(request("same", 4, seed=2))
    assert (done.finish, done.num_tokens) == (Finish.LENGTH, 4)


@pytest.mark.parametrize("seed", [np.int64(5), 1.5])
async def test_a_seed_that_is_no_int_is_refused_at_once(engine, seed):
    with pytest.raises(RequestError, match="`seed` must be an int"):
        await engine.generate(request("seeded", seed=seed))


async def test_what_fails_while_a_request_is_queued_is_its_answer(engine, monkeypatch):
    monkeypatch.setattr(engine._worker, "submit", lambda requests: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await engine.generate(request("queued"))
    monkeypatch.undo()
    assert (await engine.generate(request("queued", 2))).num_tokens == 2


async def test_more_requests_than_rows_wait_their_turn(paths):
    engine = HfEngine(RolloutConfig(model_path=paths[0], max_model_len=64, max_num_seqs=5))
    await engine.start()
    done = await engine.generate_many([request(str(i), 1 + i % 4, seed=i) for i in range(23)])
    assert [c.num_tokens for c in done] == [1 + i % 4 for i in range(23)]
    await engine.stop()
