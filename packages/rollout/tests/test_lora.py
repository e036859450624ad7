"""Which layers low-rank matrices lie over, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from offbeat_rollout import (
    ConfigError,
    GenerateRequest,
    LoraConfig,
    RolloutCapabilities,
    RolloutConfig,
    SamplingParams,
    UpdateRefused,
)
from offbeat_rollout.hf import HfEngine
from offbeat_rollout.interface import check_config
from offbeat_rollout.testing import ScriptedRollout, make_tiny_model, reference_logprobs
from offbeat_rollout.toolkit.weight_files import folder_lora_specs

LORA = LoraConfig(rank=3, alpha=6.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def names(path, **changes):
    config = RolloutConfig(model_path=path, lora=replace(LORA, **changes))
    return [name for name, _, _ in folder_lora_specs(config)]


def test_the_names_and_shapes_are_peft_s_own(path):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(path)
    linear = {
        name.rpartition(".")[2] for name, m in model.model.named_modules() if type(m) is torch.nn.Linear
    }
    config = peft.LoraConfig(r=3, target_modules=sorted(linear), task_type="CAUSAL_LM")
    saved = peft.get_peft_model_state_dict(peft.get_peft_model(model, config))
    ours = folder_lora_specs(RolloutConfig(model_path=path, lora=LORA))
    assert {name: shape for name, shape, _ in ours} == {name: tuple(t.shape) for name, t in saved.items()}


def test_targets_are_endings_of_whole_parts_of_names(path):
    assert {
        name.split(".lora_")[0].rpartition(".")[2] for name in names(path, targets=("q_proj", "mlp.up_proj"))
    } == {
        "q_proj",
        "up_proj",
    }
    with pytest.raises(ConfigError, match="no linear layer is called 'proj'; there are down_proj, gate_proj"):
        names(path, targets=("proj",))
    with pytest.raises(ConfigError, match="no linear layer is called 'lm_head'"):
        names(path, targets=("lm_head",))


def test_an_engine_without_lora_refuses_it_with_its_reason():
    capabilities = RolloutCapabilities(
        adapter="other",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        features=frozenset(),
        missing={"lora": "it was made before there were any"},
    )
    with pytest.raises(ConfigError, match=r"`lora.rank` is 3; .*: it was made before there were any"):
        check_config(RolloutConfig(model_path="m", lora=LORA), capabilities)
    assert "lora" not in ScriptedRollout.capabilities().features
    with pytest.raises(ConfigError, match=r"`lora.alpha` > 0, got 3 and 0"):
        check_config(RolloutConfig(model_path="m", lora=replace(LORA, alpha=0)), HfEngine.capabilities())


async def test_every_update_starts_from_the_base_again_and_a_wrong_one_changes_nothing(path):
    torch.set_num_threads(1)
    engine = HfEngine(RolloutConfig(model_path=path, max_model_len=64, lora=LORA))
    await engine.start()
    try:
        base = AutoModelForCausalLM.from_pretrained(path).eval()
        weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        specs = await engine.specs()
        for version in (1, 2, 3):  # errors would add up if an update lay over the one before
            torch.manual_seed(version)
            given = {name: torch.randn(shape) * 0.1 for name, shape, _ in specs}
            await engine.load(given.items(), version)
            live = engine._worker._model.state_dict()
            for name, tensor in weights.items():
                a, b = (
                    given.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight")
                    for side in "AB"
                )
                expected = tensor if a is None else tensor + 2.0 * (b @ a)
                assert torch.equal(live[name], expected), name
        base.load_state_dict(live)
        done = await engine.generate(
            GenerateRequest(
                request_id="a", prompt_ids=(3, 4, 5), sampling=SamplingParams(max_tokens=9, seed=1)
            )
        )
        expected = reference_logprobs(base, (3, 4, 5), done.token_ids.tolist(), SamplingParams(max_tokens=9))
        assert_close(torch.tensor(done.logprobs.tolist()), torch.tensor(expected), atol=1e-4, rtol=0)

        before = {name: tensor.clone() for name, tensor in engine._worker._model.state_dict().items()}
        first = next(iter(given))
        given[first] = torch.zeros(4, 64)
        with pytest.raises(UpdateRefused, match=r"lora_A.weight has shape \(4, 64\), expected \(3, 64\)"):
            await engine.load(given.items(), 4)
        assert engine.version == 3
        assert all(
            torch.equal(tensor, before[name]) for name, tensor in engine._worker._model.state_dict().items()
        )
    finally:
        await engine.stop()
