"""Weights read by each rank from the files: the bits of `from_pretrained`, and no more read than a rank keeps."""

import importlib
import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat_engine import ConfigError, Fsdp2Config, ModelConfig, World, engine_class
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.fsdp2.weights import loading
from offbeat_engine.testing import make_tiny_model
from offbeat_engine.toolkit.hf import weight_files

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,  # as many as of queries: the latent is what is small
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
FAMILIES = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "gemma3_text": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"tie_word_embeddings": False, **EXPERTS},
    # Three layers, so that none of the sizes is a multiple of the ranks; a buffer that files hold.
    "deepseek_v3": {**LATENT, **ROUTED, "first_k_dense_replace": 1, "layers": 3},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A folder of several bfloat16 files."""
    folder = tmp_path_factory.mktemp("loading")
    path = make_tiny_model(folder / "whole", family=request.param, **FAMILIES[request.param])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(folder / "cut", max_shard_size="20KB")
    assert len(list((folder / "cut").glob("*.safetensors"))) > 2
    return str(folder / "cut")


def make_engine(path, world=None, **changes):
    settings = {"collective_timeout_s": 30.0, **changes}
    engine = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path), **settings), world or World())
    engine.init_model()
    return engine


def tensors_of(model):
    """Return all parameters and buffers, tied ones under each of their names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False))
    return {name: getattr(tensor.detach(), "full_tensor", tensor.detach)() for name, tensor in named.items()}


def held(world, path, reshard="auto"):
    model = make_engine(path, world, reshard=reshard)._state.scorer.hf
    tied = len(dict(model.named_parameters(remove_duplicate=False))) - len(dict(model.named_parameters()))
    return tensors_of(model), tied


def check(got, path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = tensors_of(model)
    assert got[0].keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[0][name].dtype == tensor.dtype
        assert torch.equal(got[0][name], tensor), name
    assert got[1] == bool(model.config.tie_word_embeddings)


def test_one_rank_holds_the_bits_of_from_pretrained(family):
    check(held(World(), family), family)


def test_two_ranks_hold_the_bits_of_from_pretrained(family, two_ranks):
    check(two_ranks.run(held, family)[1], family)


def count_read(world, path):
    """Return how many numbers this rank read, and how many the files hold."""
    opened, read_so_far = weight_files.WeightFiles.opened, [0]

    class Counting(weight_files.WeightFiles):
        def opened(self, names):
            context = opened(self, names)

            class Counted:
                def __enter__(self):
                    read = context.__enter__()

                    def counting(*args, **named):
                        rows = read(*args, **named)
                        read_so_far[0] += rows.numel()
                        return rows

                    return counting

                def __exit__(self, *error):
                    return context.__exit__(*error)

            return Counted()

    whole = weight_files.WeightFiles
    weight_files.WeightFiles.opened = Counting.opened
    try:
        make_engine(path, world)
    finally:
        whole.opened = opened
    shapes = whole.find(Path(path)).shapes
    return read_so_far[0], sum(torch.Size(shape).numel() for shape in shapes.values())


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_two_ranks_read_half_each(name, tmp_path, two_ranks):
    path = make_tiny_model(tmp_path, family=name, **FAMILIES[name])
    for read, total in two_ranks.run(count_read, path):
        assert read == pytest.approx(total / 2, rel=0.01)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_layers_that_are_sharded_one_by_one_hold_the_same(name, tmp_path, two_ranks):
    path = make_tiny_model(tmp_path, family=name, **FAMILIES[name])
    check(two_ranks.run(held, path, "always")[1], path)


def test_experts_that_do_not_lie_row_by_row_are_put_together_whole(tmp_path, two_ranks):
    path = make_tiny_model(tmp_path, family="qwen3_moe", **FAMILIES["qwen3_moe"])
    check(two_ranks.run(held_without_rows, path)[1], path)


def held_without_rows(world, path):
    keeps, loading._keeps_rows = loading._keeps_rows, lambda converter: False
    try:
        return held(world, path)
    finally:
        loading._keeps_rows = keeps


def rewrite(path, change):
    weights = load_file(f"{path}/model.safetensors")
    change(weights)
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(NORM), f"lack 1 of the model's weights, such as `{NORM}`"),
        (lambda weights: weights.update({NORM: torch.ones(31)}), rf"`{NORM}` is \[31\] and should be \[32\]"),
        (lambda weights: weights.update(mtp=torch.ones(3)), "hold 1 weights that Qwen2ForCausalLM has not, such as `mtp`"),
    ],
    ids=["missing", "other shape", "extra"],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_by_name_when_planned_and_when_loaded(tmp_path, change, message):
    path = make_tiny_model(tmp_path)
    assert planned(path) == []
    rewrite(path, change)
    (refusal,) = planned(path)
    assert refusal.setting == "model.path"
    assert re.search(message, refusal.reason)
    with pytest.raises(ConfigError, match=message):
        make_engine(path)


def planned(path, **model):
    return Fsdp2Engine.check(Fsdp2Config(model=ModelConfig(path=path, **model)), 1)


def test_headers_of_every_family_are_taken_as_they_are(family):
    assert planned(family) == []
    if AutoConfig.from_pretrained(family).model_type != "gemma3_text":  # which has no value head
        assert planned(family, head="value") == []


@pytest.mark.parametrize(
    ("whole", "broken"),
    [
        ("model.safetensors", lambda file: os.truncate(file, file.stat().st_size - 8)),  # values
        ("model.safetensors", lambda file: os.truncate(file, 100)),  # header
        ("model.safetensors", lambda file: os.truncate(file, 0)),
        ("model.safetensors", lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1")),
    ],
)
def test_a_file_that_is_cut_off_is_named(tmp_path, whole, broken):
    path = make_tiny_model(tmp_path)
    broken(Path(path) / whole)
    (refusal,) = planned(path)
    assert f"{whole} is cut off or damaged" in refusal.reason
    with pytest.raises(ConfigError, match="is cut off or damaged"):
        make_engine(path)


def test_a_file_of_the_index_that_is_not_there_is_named(family, tmp_path):
    shutil.copytree(family, tmp_path / "copy")
    (gone, *_) = sorted((tmp_path / "copy").glob("*.safetensors"))
    gone.unlink()
    (refusal,) = planned(str(tmp_path / "copy"))
    assert gone.name in refusal.reason


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path, value):
    path = make_tiny_model(tmp_path)

    def spoil(weights):
        weights[NORM][3] = value

    rewrite(path, spoil)
    with pytest.raises(ConfigError, match=rf"1 weights of the model hold NaN or infinity, such as `{NORM}`"):
        make_engine(path)


def test_files_are_looked_through_for_what_is_no_number(tmp_path):
    """All of small ones; of larger ones the same share of each tensor, from its first row on."""
    path = tmp_path / "model.safetensors"
    tensors = {
        "first": torch.ones(100, 50), "last": torch.ones(100, 50), "large": torch.full((100, 50), 3e38), "one": torch.tensor(1.0),
        "none": torch.zeros(0, 4), "ids": torch.full((9,), -1),
    }  # fmt: skip
    tensors["first"][0, 49], tensors["last"][99, 0] = torch.nan, -torch.inf
    save_file(tensors, path)
    files = weight_files.WeightFiles.find(tmp_path)
    assert files.non_finite() == {"first": path, "last": path}
    assert files.non_finite(path.stat().st_size // 2) == {"first": path}
    save_file({**tensors, "one": torch.tensor(torch.inf)}, path)
    assert files.non_finite(1) == {"first": path, "one": path}


def spoiled(world, path):
    with pytest.raises(ConfigError) as caught:
        make_engine(path, world)
    return str(caught.value)


def test_all_ranks_refuse_what_is_no_number_in_the_part_of_one(tmp_path, two_ranks):
    path = make_tiny_model(tmp_path)

    def spoil(weights):
        weights["model.embed_tokens.weight"][-1, -1] = torch.nan  # a row of the last rank

    rewrite(path, spoil)
    first, second = two_ranks.run(spoiled, path)
    assert first == second
    assert "`model.embed_tokens.weight`" in first


def test_experts_of_other_shapes_are_refused_by_name(tmp_path):
    path = make_tiny_model(tmp_path, family="qwen3_moe", **FAMILIES["qwen3_moe"])
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    rewrite(path, lambda weights: weights.update({name: torch.ones(3, 32)}))
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj` cannot be made of"):
        make_engine(path)


@pytest.mark.parametrize("kept", ["head", "both", "differing"])
def test_tied_weights_are_what_the_files_say(tmp_path, kept):
    path = make_tiny_model(tmp_path)

    def change(weights):
        embedding = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = embedding + (kept == "differing")
        if kept == "head":
            del weights["model.embed_tokens.weight"]

    rewrite(path, change)
    got = held(World(), path)
    assert got[1] == (kept != "differing")
    expected = tensors_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    for name, tensor in expected.items():
        assert torch.equal(got[0][name], tensor), name


CODE = """
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
class Own(Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("factors", torch.arange(4.0), persistent=False)
        INIT
"""


def remote_model(path, init):
    make_tiny_model(path)
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "own.Own"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "own.py").write_text(CODE.replace("INIT", init))
    return ModelConfig(path=str(path), trust_remote_code=True)


def test_a_buffer_that_nobody_computes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    model = remote_model(tmp_path / "model", "")
    with pytest.raises(ConfigError, match="`_init_weights` how to compute `factors`"):
        Fsdp2Engine(Fsdp2Config(model=model), World()).init_model()


def test_a_model_that_wants_values_as_it_is_built_is_loaded_whole(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    model = remote_model(tmp_path / "model", "self.lm_head.weight.sum().item()")
    with caplog.at_level(logging.WARNING, logger="offbeat_engine"), pytest.raises(ConfigError):
        Fsdp2Engine(Fsdp2Config(model=model), World()).init_model()  # transformers cannot either
    assert "every rank loads the whole model into host memory: the model cannot be built" in caplog.text


def test_a_folder_without_safetensors_is_loaded_whole_and_says_so(tmp_path, caplog):
    path = make_tiny_model(tmp_path)
    expected = held(World(), path)[0]
    torch.save(load_file(f"{path}/model.safetensors"), f"{path}/pytorch_model.bin")
    Path(f"{path}/model.safetensors").unlink()
    with caplog.at_level(logging.WARNING, logger="offbeat_engine"):
        got = held(World(), path)[0]
    assert "the folder has no safetensors" in caplog.text
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def refused(world, path, other):
    with pytest.raises(ConfigError) as caught:
        make_engine(other if world.rank == 1 else path, world)
    return str(caught.value)


def test_all_ranks_refuse_what_one_cannot_read(tiny, tmp_path, two_ranks):
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    rewrite(other, lambda weights: weights.pop(NORM))
    first, second = two_ranks.run(refused, tiny, str(other))
    assert "another rank could not build the model: rank 1" in first
    assert f"lack 1 of the model's weights, such as `{NORM}`" in second


def test_a_changed_transformers_is_not_a_fault_of_the_folder(tiny, monkeypatch):
    monkeypatch.setattr("transformers.core_model_loading.rename_source_key", lambda name: (name, None))
    with pytest.raises(
        ConfigError, match=r"transformers 5\..* is not one that this package was made for .*5 were given"
    ) as caught:
        Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=tiny)), World()).init_model()
    assert tiny not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module"),
    [("fsdp2", "offbeat_engine.fsdp2.memory.sharding"), ("megatron", "offbeat_engine.megatron.build")],
)
def test_a_file_that_is_damaged_while_weights_are_read_is_a_refusal_of_all_ranks(
    name, module, tmp_path, monkeypatch
):
    path = Path(make_tiny_model(tmp_path))
    found = importlib.import_module(module)
    fill = found.fill

    def damaged(*args):
        os.truncate(path / "model.safetensors", 100)
        return fill(*args)

    monkeypatch.setattr(found, "fill", damaged)
    kind = engine_class(name)
    with pytest.raises(ConfigError, match="could not be read from their files"):
        kind(kind.Config(model=ModelConfig(path=str(path))), World()).init_model()
