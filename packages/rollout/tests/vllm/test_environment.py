from __future__ import annotations

import pytest

from offbeat_rollout import ConfigError
from offbeat_rollout.vllm import VllmConfig, VllmEngine, vllm_environment
from offbeat_rollout.vllm.processes import check_environment


def test_what_it_returns_satisfies_the_check():
    for config in (
        VllmConfig(model_path=""),
        VllmConfig(model_path="", device="cuda"),
        VllmConfig(model_path="", tensor_parallel_size=2),
    ):
        check_environment(config, vllm_environment(config))


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING"])
def test_each_needed_variable_is_missed_by_name(name):
    config = VllmConfig(model_path="")
    environment = {key: value for key, value in vllm_environment(config).items() if key != name}
    with pytest.raises(ConfigError, match=f"lacks {name}="):
        check_environment(config, environment)


def test_cores_are_shared_out_among_tensor_parallel_workers():
    config = VllmConfig(model_path="", tensor_parallel_size=2)
    assert vllm_environment(config, [0, 1, 4, 5])["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|4,5"
    assert vllm_environment(config)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    with pytest.raises(ConfigError, match="1 cores for 2"):
        vllm_environment(config, [3])


async def test_start_refuses_before_vllm_is_imported(tmp_path, monkeypatch):
    from offbeat_rollout.testing import make_tiny_model

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        await VllmEngine(VllmConfig(model_path=str(tmp_path))).start()
    with pytest.raises(ConfigError, match=r"environment lacks .*TORCHDYNAMO_DISABLE=1"):
        await VllmEngine(VllmConfig(model_path=make_tiny_model(tmp_path))).start()
