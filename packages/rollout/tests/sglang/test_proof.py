"""What SGLang must hold after an update, told from the tensors that were sent; test_engine.py holds it against SGLang."""

from __future__ import annotations

import hashlib

import pytest
import torch

from offbeat_rollout import ConfigError
from offbeat_rollout.sglang.proof import checksums, differing, sources_of

NAMES = {
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
}
HELD = {
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.norm.weight",
}


def hashed(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).digest()[:8].hex()


def test_a_parameter_is_a_tensor_or_several_or_one_with_rows_of_zeros():
    tensors = {name: torch.randn(3, 4) for name in NAMES} | {"model.embed_tokens.weight": torch.randn(70, 4)}
    found = checksums(sources_of(HELD, NAMES, tied=False), tensors.__getitem__)
    attention = [tensors[f"model.layers.0.self_attn.{one}_proj.weight"] for one in "qkv"]
    mlp = [tensors[f"model.layers.0.mlp.{one}_proj.weight"] for one in ("gate", "up")]
    assert found == {
        "model.embed_tokens.weight": hashed(
            torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(58, 4)])
        ),
        "model.layers.0.self_attn.qkv_proj.weight": hashed(torch.cat(attention)),
        "model.layers.0.mlp.gate_up_proj.weight": hashed(torch.cat(mlp)),
        "model.norm.weight": hashed(tensors["model.norm.weight"]),
    }


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_experts_are_stacked_one_after_the_other(names):
    prefix = "model.layers.0.mlp.experts."
    gate, up, down = names
    tensors = {f"{prefix}{expert}.{name}.weight": torch.randn(3, 4) for name in names for expert in range(12)}
    held = {f"{prefix}w13_weight", f"{prefix}w2_weight"}
    found = checksums(sources_of(held, tensors, tied=False), tensors.__getitem__)
    first = [tensors[f"{prefix}{expert}.{name}.weight"] for expert in range(12) for name in (gate, up)]
    second = [tensors[f"{prefix}{expert}.{down}.weight"] for expert in range(12)]
    assert found == {
        f"{prefix}w13_weight": hashed(torch.cat(first)),
        f"{prefix}w2_weight": hashed(torch.cat(second)),
    }
    missing = {name for name in tensors if ".7." not in name}
    with pytest.raises(ConfigError, match=r"experts\.11"):  # what comes behind it belongs to nothing
        sources_of(held, missing, tied=False)


def test_half_precision_and_strides_are_read_as_they_lie():
    tensor = torch.randn(4, 3).to(torch.bfloat16).t()
    (found,) = checksums({"w": ("w",)}, lambda _: tensor).values()
    assert found == hashed(tensor.contiguous().view(torch.int16))


@pytest.mark.parametrize(
    ("held", "given", "named"),
    [
        (HELD | {"model.layers.0.mlp.experts.w13_weight"}, NAMES, "w13_weight"),
        (HELD, NAMES | {"model.layers.0.mlp.router.weight"}, "router"),
        (HELD, NAMES - {"model.layers.0.self_attn.k_proj.weight"}, "qkv_proj"),
        (HELD, NAMES | {"lm_head.weight"}, "lm_head"),
    ],
)
def test_what_belongs_to_nothing_is_named(held, given, named):
    with pytest.raises(ConfigError, match=named):
        sources_of(held, given, tied=False)


def test_a_tied_head_is_the_embedding():
    assert sources_of(HELD, NAMES | {"lm_head.weight"}, tied=True).keys() == HELD


def test_what_differs_and_what_is_missing_is_named():
    assert differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0", "d": "4"}) == ["b", "c", "d"]
