from __future__ import annotations

import subprocess
import sys

import pytest

from offbeat_rollout import ConfigError, RolloutConfig, adapter_class, adapter_environment, adapter_names


def test_names_and_classes():
    assert {"hf", "sglang", "vllm"} <= set(adapter_names())
    assert adapter_class("hf").capabilities().adapter == "hf"
    assert adapter_class("vllm").capabilities().adapter == "vllm"
    with pytest.raises(ConfigError, match=r"no rollout adapter named 'tgi'; installed: .*hf.*vllm"):
        adapter_class("tgi")


def test_environments_are_values():
    config = RolloutConfig(model_path="", cpu_threads=2)
    assert adapter_environment("hf", config)["OMP_NUM_THREADS"] == "2"
    assert adapter_environment("vllm", config, [0, 1])["VLLM_NO_USAGE_STATS"] == "1"


def test_looking_an_adapter_up_imports_no_heavy_library():
    program = (
        "import sys; from offbeat_rollout import *; from offbeat_rollout import adapter_class, ReplicaPool\n"
        "[adapter_class(n).capabilities() for n in ('hf', 'sglang', 'vllm')]\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'aiohttp', 'ray') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.strip() == "[]"
