"""A seeded request gives the same bits whoever is beside it: alone, in a crowd, arriving late, in any order."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from offbeat_rollout import ConfigError, GenerateRequest, RolloutConfig, SamplingParams
from offbeat_rollout.hf.decode import RunningBatch, new_row
from offbeat_rollout.hf.model import load_model
from offbeat_rollout.testing import make_tiny_model

VARIANTS = [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"temperature": 1.3, "top_p": 0.8}]


@pytest.fixture(
    scope="module", params=[{}, {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}]
)
def model(request, tmp_path_factory):
    path = make_tiny_model(tmp_path_factory.mktemp("model"), **request.param)
    torch.set_num_threads(1)
    return load_model(RolloutConfig(model_path=path, max_model_len=256))


def requests(count):
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=tuple(random.Random(i // 2).randrange(1, 96) for _ in range(1 + i // 2 * 7 % 45)),
            sampling=SamplingParams(max_tokens=3 + i * 5 % 40, seed=i, **VARIANTS[i % 5]),
        )
        for i in range(count)
    ]


def run(model, wanted, per_step):
    """Generate `wanted`, letting `per_step` of them join before each token."""
    batch, left, done = RunningBatch(model, 1), [new_row(r, (), 256) for r in wanted], {}
    while left or batch.rows:
        if left:
            batch.join(left[:per_step])
            left = left[per_step:]
        batch.step(0)
        done |= {row.request.request_id: row.completion(finish) for row, finish in batch.finished()}
    return done


def test_results_do_not_depend_on_the_batch_bit_for_bit(model):
    crowd = requests(40)
    together = run(model, crowd, 40)
    assert run(model, crowd[::-1], 3) == together
    for request in crowd[::3]:
        assert run(model, [request], 1)[request.request_id] == together[request.request_id]


def test_prompts_shared_by_many_are_computed_once(model):
    calls = []
    hook = model.register_forward_pre_hook(lambda *a: calls.append(a[2]["input_ids"].shape), with_kwargs=True)
    prompts = [tuple(range(1, 14)), tuple(range(5, 30))]
    rows = [
        new_row(
            GenerateRequest(
                request_id=str(i), prompt_ids=prompts[i % 2], sampling=SamplingParams(max_tokens=2)
            ),
            (),
            256,
        )
        for i in range(64)
    ]
    RunningBatch(model, 1).join(rows)
    hook.remove()
    assert calls == [(1, 16), (1, 32)]


def test_the_batch_shrinks_when_rows_finish(model):
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda *a: sizes.append(a[2]["input_ids"].shape[0]), with_kwargs=True
    )
    wanted = [
        GenerateRequest(
            request_id=str(i), prompt_ids=(3,), sampling=SamplingParams(max_tokens=1 + i // 16, seed=i)
        )
        for i in range(64)
    ]
    run(model, wanted, 64)
    hook.remove()
    assert sizes == [64, 48, 32, 16]


def test_keys_and_values_can_be_computed_again(model):
    wanted = requests(6)
    undisturbed = run(model, wanted, 6)
    batch = RunningBatch(model, 1)
    batch.join([new_row(r, (), 256) for r in wanted])
    done = {}
    while batch.rows:
        batch.step(0)
        done |= {row.request.request_id: row.completion(finish) for row, finish in batch.finished()}
        batch.recompute()
    for name, completion in undisturbed.items():
        assert done[name].token_ids.tolist() == completion.token_ids.tolist()
        torch.testing.assert_close(
            torch.tensor(done[name].logprobs.tolist()),
            torch.tensor(completion.logprobs.tolist()),
            atol=1e-5,
            rtol=0,
        )


def test_a_model_of_its_own_code_is_sampled_where_that_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = Path(make_tiny_model(tmp_path / "model"))
    shape = json.loads((folder / "config.json").read_text())
    family = shape["architectures"][0]
    own = {
        "model_type": "theirs",
        "auto_map": {"AutoConfig": "own.Shape", "AutoModelForCausalLM": "own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(shape | own))
    (folder / "own.py").write_text(
        f"from transformers import {family}\n"
        f"class Shape({family}.config_class): model_type = 'theirs'\n"
        f"class Own({family}): config_class = Shape\n"
    )
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_model(RolloutConfig(model_path=str(folder)))
    assert type(load_model(RolloutConfig(model_path=str(folder), trust_remote_code=True))).__name__ == "Own"
