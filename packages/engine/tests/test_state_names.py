"""Names and regions of what models hold, for any number of ranks, on models that exist as shapes alone."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat_engine.fsdp2.weights.state_names import LocalPart, StateNames
from offbeat_engine.toolkit.state.slices import Region, SliceReader, check_fit, merge, said_of, write_slices
from offbeat_engine.toolkit.state.training_state import EXP_AVG, WEIGHT

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen3": {},
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 24},
    # One of its weights is three of its files' tensors, one after the other.
    "olmo_hybrid": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def part_of(kind, name, whole, rank, size, dim=0):
    """Return what `rank` of `size` holds of a tensor, as `torch.chunk` cuts it along `dim`."""
    parts = whole.chunk(size, dim) if whole.dim() else (whole,) * size
    values = parts[rank] if rank < len(parts) else whole[:0]
    offsets = [0] * whole.dim()
    if whole.dim():
        offsets[dim] = sum(part.shape[dim] for part in parts[:rank])
    region = Region(tuple(offsets), tuple(values.shape))
    return LocalPart(kind=kind, name=name, values=values, region=region, shape=tuple(whole.shape))


def cuts_of(names, name, whole, size):
    """Return the dimensions along which `size` ranks may cut a tensor evenly, rows first."""
    others = [dim for dim in range(1, whole.dim()) if whole.dim() == 3 and whole.shape[dim] % size == 0]
    return [0, *(dim for dim in others if names.can_cut(name, dim))]


@pytest.mark.parametrize(("written", "read"), [(2, 1), (1, 3), (3, 8)])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_some_ranks_write_others_read(tmp_path, family, written, read):
    config = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family])
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    names, draw = StateNames(hf), torch.Generator().manual_seed(0)
    state = {
        (kind, name): torch.randn(param.shape, generator=draw)
        for kind in (WEIGHT, EXP_AVG)
        for name, param in hf.named_parameters()
    }
    index = merge(
        [
            said_of(
                write_slices(
                    tmp_path,
                    rank,
                    (
                        piece
                        for (kind, name), whole in state.items()
                        for piece in names.pieces(
                            part_of(
                                kind, name, whole, rank, written, cuts_of(names, name, whole, written)[-1]
                            )
                        )
                    ),
                )[0]
            )
            for rank in range(written)
        ],
        "here",
    )
    reader = SliceReader(tmp_path, index)
    wanted = {}
    for (kind, name), whole in state.items():
        for rank in range(read):
            for dim in cuts_of(names, name, whole, read):
                expected = part_of(kind, name, whole, rank, read, dim)
                held = part_of(kind, name, torch.full_like(whole, torch.nan), rank, read, dim)
                names.fill(held, reader)
                assert torch.equal(held.values, expected.values), name
        wanted |= names.wanted(expected)
    check_fit(index, wanted, "here")
    assert wanted.keys() == index.keys()


def test_experts_are_cut_along_what_their_own_tensors_have():
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SHAPE, **FAMILIES["mixtral"]))
    names = StateNames(hf)
    both, down = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    assert [names.can_cut(both, dim) for dim in (1, 2)] == [False, True]
    assert [names.can_cut(down, dim) for dim in (1, 2)] == [True, True]


def test_what_is_not_taken_apart_expert_by_expert_keeps_its_name_in_memory():
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("olmo_hybrid", **SHAPE, **FAMILIES["olmo_hybrid"])
        )
    name = "model.layers.0.linear_attn.conv1d.weight"
    assert StateNames(hf).names(name) == [name]
    assert StateNames(hf).names("model.layers.0.input_layernorm.weight") == [
        "model.layers.0.attention_layer_norm.weight"
    ]


def test_experts_are_called_one_by_one_and_other_state_as_in_memory():
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SHAPE, **FAMILIES["mixtral"]))
    name, names = "model.layers.1.mlp.experts.down_proj", StateNames(hf)
    codes = torch.empty(hf.get_parameter(name).shape, dtype=torch.uint8)
    held = LocalPart(
        kind="exp_avg_codes/",
        name=name,
        values=codes,
        region=Region.whole(tuple(codes.shape)),
        shape=tuple(codes.shape),
    )
    assert names.names(name) == [f"model.layers.1.block_sparse_moe.experts.{n}.w2.weight" for n in range(5)]
    assert names.wanted(held) == {f"exp_avg_codes/{name}": (tuple(codes.shape), torch.uint8)}
    assert [piece.name for piece in names.pieces(held)] == [f"exp_avg_codes/{name}"]
