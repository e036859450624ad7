"""The reference that Megatron's self-check compares with is computed on a device on which nothing else lies yet."""

import pytest
import torch

from offbeat_engine import ConfigError, ModelConfig, World
from offbeat_engine.megatron import MegatronConfig, MegatronEngine, engine, self_check
from offbeat_engine.testing import make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None")  # megatron-core's own


def made(folder):
    return MegatronEngine(
        MegatronConfig(model=ModelConfig(path=make_tiny_model(folder, family="qwen2"))), World()
    )


def noting(patch, module, name, calls):
    inner = getattr(module, name)

    def noted(*args, **kwargs):
        calls.append(name)
        return inner(*args, **kwargs)

    patch.setattr(module, name, noted)


def test_it_comes_before_weights_and_optimizer(tmp_path, monkeypatch):
    calls = []
    noting(monkeypatch, self_check, "plain_forward", calls)
    noting(monkeypatch, engine, "build_parts", calls)
    made(tmp_path).init_model()
    assert calls == ["plain_forward", "build_parts"]


def test_memory_that_runs_out_in_it_is_called_that(tmp_path, monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(self_check, "plain_forward", no_memory)
    with pytest.raises(
        ConfigError, match=r"one layer in float32, .* does not fit on cpu: CUDA out of memory"
    ):
        made(tmp_path).init_model()
