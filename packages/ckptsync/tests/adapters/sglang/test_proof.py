"""What SGLang must hold after an update, told from the tensors that were sent; the trainer's tests hold it against SGLang."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offbeat_ckptsync.adapters.sglang import server
from offbeat_ckptsync.adapters.sglang.server import (
    Layout,
    NotProvableError,
    Proof,
    differing,
    gpu_hash,
    held_by_ranks,
)

ALONE = Layout()
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
    return hashlib.sha256(_raw(tensor)).digest()[:8].hex()


def _raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_parameter_is_a_tensor_or_several_or_one_with_rows_of_zeros():
    tensors = {name: torch.randn(3, 4) for name in NAMES} | {"model.embed_tokens.weight": torch.randn(70, 4)}
    (found,) = Proof(HELD, NAMES, ALONE).expected(tensors.__getitem__)
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
    tensors = {f"{prefix}{expert}.{name}.weight": torch.randn(4, 4) for name in names for expert in range(12)}
    held = {f"{prefix}w13_weight", f"{prefix}w2_weight"}
    first = [tensors[f"{prefix}{expert}.{name}.weight"] for expert in range(12) for name in (gate, up)]
    second = [tensors[f"{prefix}{expert}.{down}.weight"] for expert in range(12)]
    assert Proof(held, tensors, ALONE).expected(tensors.__getitem__) == [
        {f"{prefix}w13_weight": hashed(torch.cat(first)), f"{prefix}w2_weight": hashed(torch.cat(second))}
    ]
    shared = Proof(held, tensors, Layout(num_ranks=2, num_kv_heads=2)).expected(tensors.__getitem__)
    assert shared == [
        {
            f"{prefix}w13_weight": hashed(torch.cat([one[rows] for one in first])),
            f"{prefix}w2_weight": hashed(torch.stack([one[:, rows] for one in second])),
        }
        for rows in (slice(0, 2), slice(2, 4))
    ]
    missing = {name for name in tensors if ".7." not in name}
    with pytest.raises(NotProvableError, match=r"experts\.11"):  # what comes behind it belongs to nothing
        Proof(held, missing, ALONE, tied=False)


def test_half_precision_and_strides_are_read_as_they_lie():
    tensor = torch.randn(4, 3).to(torch.bfloat16).t()
    (found,) = Proof(["w"], ["w"], ALONE).expected(lambda _: tensor)
    assert found == {"w": hashed(tensor.contiguous().view(torch.int16))}


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
    with pytest.raises(NotProvableError, match=named):
        Proof(held, given, ALONE, tied=False)


def test_a_tied_head_is_the_embedding():
    tensors = {name: torch.ones(1, 1) for name in NAMES | {"lm_head.weight"}}
    (found,) = Proof(HELD, tensors, ALONE, tied=True).expected(tensors.__getitem__)
    assert found.keys() == HELD


def test_what_differs_and_what_is_missing_is_named_whichever_rank_has_it():
    ones, twos = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0", "d": "4"}
    assert differing([ones], [twos]) == ["b", "c", "d"]
    assert differing([ones, ones], [ones, twos]) == ["b", "c", "d"]
    assert not differing([ones, twos], [ones, twos])


HEADS, OF_KEYS, WIDTH, HIDDEN, INNER, VOCAB = 8, 2, 3, 5, 16, 70
LAYER = {
    "self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN),
    "self_attn.k_proj.weight": (OF_KEYS * WIDTH, HIDDEN),
    "self_attn.v_proj.weight": (OF_KEYS * WIDTH, HIDDEN),
    "self_attn.q_proj.bias": (HEADS * WIDTH,),
    "self_attn.k_proj.bias": (OF_KEYS * WIDTH,),
    "self_attn.v_proj.bias": (OF_KEYS * WIDTH,),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
    "self_attn.o_proj.bias": (HIDDEN,),
    "self_attn.q_norm.weight": (WIDTH,),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
}
SHAPES = {f"model.layers.3.{name}": shape for name, shape in LAYER.items()} | {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "lm_head.weight": (VOCAB, HIDDEN),
}


def parts_of(tensors, ranks, rank):
    """What SGLang's layers load, row by row and head by head, written after its `weight_loader`s and sharing nothing with ours."""
    whole = {name.rpartition("layers.3.")[2]: tensor for name, tensor in tensors.items()}
    mine = [head for head in range(HEADS) if head * ranks // HEADS == rank]
    keys = sorted({head * OF_KEYS // HEADS for head in mine})
    found = {}
    for end in ("weight", "bias"):
        rows = []
        for one, heads in (("q", mine), ("k", keys), ("v", keys)):
            tensor = whole[f"self_attn.{one}_proj.{end}"]
            rows += [tensor[head * WIDTH + i] for head in heads for i in range(WIDTH)]
        found[f"self_attn.qkv_proj.{end}"] = torch.stack(rows)
    of_mine = [head * WIDTH + i for head in mine for i in range(WIDTH)]
    inner = [i for i in range(INNER) if i * ranks // INNER == rank]
    found["self_attn.o_proj.weight"] = whole["self_attn.o_proj.weight"][:, of_mine]
    found["mlp.gate_up_proj.weight"] = torch.cat(
        [whole[f"mlp.{one}_proj.weight"][inner] for one in ("gate", "up")]
    )
    found["mlp.down_proj.weight"] = whole["mlp.down_proj.weight"][:, inner]
    for name in ("self_attn.o_proj.bias", "self_attn.q_norm.weight", "input_layernorm.weight"):
        found[name] = whole[name]
    found = {f"model.layers.3.{name}": tensor for name, tensor in found.items()}
    padded = 64
    while padded < VOCAB or padded % (64 if padded % ranks == 0 else 64 * ranks):
        padded += 64
    rows = range(rank * padded // ranks, (rank + 1) * padded // ranks)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = torch.stack(
            [tensors[name][row] if row < VOCAB else torch.zeros(HIDDEN) for row in rows]
        )
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_rank_holds_its_part(ranks):
    """With two heads of keys, four ranks have one head for two of them, and eight one for four."""
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    layout = Layout(num_ranks=ranks, num_kv_heads=OF_KEYS)
    found = Proof(parts_of(tensors, ranks, 0), tensors, layout).expected(tensors.__getitem__)
    assert found == [
        {name: hashed(part) for name, part in parts_of(tensors, ranks, rank).items()} for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_kv_heads": 0}, "2 ranks cannot be told to share 0 heads"),
        ({"num_kv_heads": 3}, "2 ranks cannot be told to share 3 heads"),
        ({"more": "model.layers.3.mlp.fc1.weight"}, r"how 2 ranks share \['model\.layers\.3\.mlp\.fc1"),
    ],
)
def test_what_ranks_share_in_a_way_that_cannot_be_told_is_refused(changes, named):
    more = [changes.pop("more")] if "more" in changes else []
    layout = Layout(**{"num_ranks": 2, "num_kv_heads": OF_KEYS, **changes})
    with pytest.raises(NotProvableError, match=named):
        Proof([*HELD, *more], [*NAMES, *more], layout)


def test_the_ranks_of_an_answer_are_those_that_share_the_model():
    def said(rank, names="ab", **about):
        about = {"tp_rank": rank, "tp_size": 2, "pp_size": 1, "dp_size": 1, **about}
        return {"checksums": dict.fromkeys(names, str(rank)), "parallelism_info": [about]}

    assert held_by_ranks({"ranks": [said(1), said(0)]}, 2) == [{"a": "0", "b": "0"}, {"a": "1", "b": "1"}]
    assert held_by_ranks({"ranks": [{"checksums": {"a": "0"}}]}, 1) == [{"a": "0"}]
    for wrong in (
        {},
        {"ranks": [said(0)]},
        {"ranks": [said(0), said(0)]},
        {"ranks": [said(0), said(1, names="ac")]},
        {"ranks": [said(0, pp_size=2), said(1, pp_size=2)]},
        {"ranks": [said(0), said(1), said(2)]},
    ):
        with pytest.raises(NotProvableError, match=r"no checksums of 2 rank\(s\) that share one model"):
            held_by_ranks(wrong, 2)


@pytest.mark.sglang
@pytest.mark.spawns
def test_the_hash_of_gpus_is_that_of_sglang_s_kernel():
    """Its kernel is Triton's, whose interpreter runs it on a CPU; tails of bytes and of tiles, one tile and several."""
    script = Path(__file__).with_name("hash_by_kernel.py")
    sizes = [0, 1, 6, 4 * 8192, 4 * 8192 + 2, 12 * 8192 + 5]
    own = Path(sys.prefix)
    python = own.with_name(f"{own.name}-sglang") / "bin" / "python"  # as tools/setup makes it
    said = subprocess.run(
        [str(python), str(script), *map(str, sizes)], stdout=subprocess.PIPE, check=True, timeout=500
    ).stdout
    theirs = json.loads(said)
    ours = [
        gpu_hash(torch.arange(size).mul(2654435761).add(size).bitwise_right_shift(7).to(torch.uint8))
        for size in sizes
    ]
    assert ours == theirs
    assert len(set(ours)) == len(sizes)


def test_however_much_is_hashed_at_a_time(monkeypatch):
    data = torch.randint(256, (4 * 8192 * 5 + 3,), dtype=torch.uint8)
    whole = gpu_hash(data)
    monkeypatch.setattr(server, "_SPAN", 2 * 8192)
    assert gpu_hash(data) == whole


@pytest.mark.gpu(1)
def test_the_hash_of_gpus_is_the_same_wherever_it_is_computed():
    """Never run: no GPU was there."""
    data = torch.randint(256, (4 * 8192 * 300 + 3,), dtype=torch.uint8)
    assert gpu_hash(data.cuda()) == gpu_hash(data)


def test_on_gpus_the_same_parts_go_into_the_hash_of_gpus(monkeypatch):
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in SHAPES.items()}
    monkeypatch.setattr(server, "gpu_hash", lambda data: int(hashed(data), 16))
    on_cpu, on_gpu = (
        Proof(
            parts_of(tensors, 1, 0), tensors, Layout(num_ranks=2, num_kv_heads=OF_KEYS, on_gpu=on_gpu)
        ).expected(tensors.__getitem__)
        for on_gpu in (False, True)
    )
    assert on_cpu == on_gpu
