from __future__ import annotations

from dataclasses import fields

import pytest

from offbeat_rollout import ConfigError, RolloutConfig
from offbeat_rollout.testing import make_tiny_model
from offbeat_rollout.vllm import VllmConfig, VllmEngine
from offbeat_rollout.vllm.arguments import OURS, OURS_ON_CPU, argument_names, cpu_head_sizes


def config(device="cpu", model_path="m", **engine_args):
    return VllmConfig(model_path=model_path, device=device, engine_args=engine_args)


def test_what_vllm_takes_passes():
    VllmEngine.check(config(seed=3, scheduling_policy="priority"))
    VllmEngine.check(config(device="cuda", kv_cache_dtype="fp8", max_num_batched_tokens=4096))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_cach_dtype": "fp8"}, "vLLM has no `kv_cach_dtype`; did you mean `kv_cache_dtype`"),
        ({"zzz": 1}, "vLLM has no `zzz`"),
        ({"dtype": "float16"}, "`dtype` is not taken there: set `dtype`"),
        ({"enable_prefix_caching": True}, "`enable_prefix_caching` is not taken there: set `prefix_caching`"),
        ({"max_num_batched_tokens": 1}, "prompts are computed whole on CPU"),
        (
            {"model": "m", "colour": "red"},
            r"`model` is not taken there: set `model_path`; vLLM has no `colour`",
        ),
    ],
)
def test_what_it_does_not_is_refused_by_name(given, message):
    with pytest.raises(ConfigError, match=message):
        VllmEngine.check(config(**given))


def test_graphs_on_a_cpu_are_refused():
    with pytest.raises(ConfigError, match="a CPU has no CUDA graphs"):
        VllmEngine.check(VllmConfig(model_path="m", enforce_eager=False))
    VllmEngine.check(VllmConfig(model_path="m", device="cuda", enforce_eager=False))


def test_settings_of_another_adapter_are_refused():
    with pytest.raises(ConfigError, match="settings of the class VllmConfig, got RolloutConfig"):
        VllmEngine(RolloutConfig(model_path="m"))


@pytest.mark.vllm
def test_the_names_are_the_fields_of_vllm_s_dataclass():
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in fields(AsyncEngineArgs)}
    assert argument_names() == names
    assert names >= OURS.keys() | OURS_ON_CPU.keys()


@pytest.mark.vllm
def test_heads_that_vllm_has_no_kernel_for_are_refused_where_the_model_is_there(tmp_path):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(cpu_head_sizes()) == CPUAttentionBackend.get_supported_head_sizes()
    path = make_tiny_model(tmp_path, hidden_size=48)
    with pytest.raises(ConfigError, match="head dimension of 24"):
        VllmEngine.check(config(model_path=path))
    VllmEngine.check(config(model_path=path, device="cuda"))
    VllmEngine.check(config(model_path=make_tiny_model(tmp_path / "other", hidden_size=64)))


@pytest.mark.vllm
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_set_here_cannot_be_given_and_what_is_given_arrives(device, tmp_path):
    from offbeat_rollout.config import LoraConfig
    from offbeat_rollout.vllm.arguments import engine_args
    from offbeat_rollout.vllm.updates import lora_args

    # A folder that is there: without a network vLLM looks for others in its cache.
    made = engine_args(config(device=device, model_path=str(tmp_path), seed=3, kv_cache_dtype="fp8"))
    assert (made.seed, made.kv_cache_dtype) == (3, "fp8")
    assert made.enforce_eager == (device == "cpu")
    assert made.enable_prefix_caching == (device == "cuda")
    assert lora_args(LoraConfig(rank=4)).keys() <= OURS.keys()
