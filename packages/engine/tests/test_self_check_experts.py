"""What `init_model` finds out about a mixture in bfloat16, where rounding decides between experts that score alike."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers.models.mixtral import modeling_mixtral as mixtral

from offbeat_engine import ConfigError, Fsdp2Config, ModelConfig, World
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import make_tiny_model
from offbeat_engine.testing.models import FAMILIES

DBRX = {
    "n_heads": 4,
    "tie_word_embeddings": False,
    "d_model": 32,
    "n_layers": 2,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64},
}
SETTINGS = {
    "dbrx": DBRX,
    "mixtral": FAMILIES["mixtral"].settings,
    "qwen3_moe": FAMILIES["qwen3_moe"].settings,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Makes a mixture of a family whose matrices are three times as large: another expert is another answer."""

    def made(family):
        folder = tmp_path_factory.mktemp("models")
        path = make_tiny_model(folder, family=family, **SETTINGS[family])
        weights = load_file(Path(path) / "model.safetensors")
        weights = {name: weight * 3 if weight.dim() > 1 else weight for name, weight in weights.items()}
        save_file(weights, Path(path) / "model.safetensors", metadata={"format": "pt"})
        return path

    return made


def build(path, world=None, dtype="bfloat16", **changes):
    config = Fsdp2Config(model=ModelConfig(path=path), dtype=dtype, **changes)
    Fsdp2Engine(config, world or World()).init_model()


@pytest.mark.parametrize("family", SETTINGS)
@pytest.mark.parametrize("packing", [True, False])
def test_near_ties_are_no_difference(large, family, packing):
    build(large(family), packing=packing)


def on_ranks(world, path):
    build(path, world, sequence_parallel_size=2)


@pytest.mark.spawns
def test_near_ties_are_none_where_ranks_share_a_sequence(large, two_ranks):
    two_ranks.run(on_ranks, large("mixtral"))


def scaled_logits(monkeypatch):
    plain = mixtral.MixtralForCausalLM.forward

    def forward(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 0.8
        return output

    monkeypatch.setattr(mixtral.MixtralForCausalLM, "forward", forward)


def leaking_layer(monkeypatch):
    plain = mixtral.MixtralSparseMoeBlock.forward
    monkeypatch.setattr(
        mixtral.MixtralSparseMoeBlock,
        "forward",
        lambda self, x: plain(self, x) + functional.pad(x, (0, 0, 1, 0))[:, :-1],
    )


def other_experts_in_rows(monkeypatch):
    plain = mixtral.MixtralTopKRouter.forward

    def forward(self, x):
        with Worst() if x.shape[-2] > 200 else torch.no_grad():
            return plain(self, x)

    monkeypatch.setattr(mixtral.MixtralTopKRouter, "forward", forward)


class Worst(torch.overrides.TorchFunctionMode):
    """Within it a choice among experts falls on those that score least."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}), **({"largest": False} if func is torch.topk else {}))


PLANTED = {
    scaled_logits: "no setting of this engine makes them agree",
    leaking_layer: "set `packing: false`",
    other_experts_in_rows: "MixtralForCausalLM: a probe token has",
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_difference_beside_near_ties_is_refused(large, monkeypatch, plant, dtype):
    plant(monkeypatch)
    with pytest.raises(ConfigError, match=PLANTED[plant]):
        build(large("mixtral"), dtype=dtype)
