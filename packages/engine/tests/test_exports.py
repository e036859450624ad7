"""What an export leaves as it was: folders that hold other things, and numbers that the model computes with in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offbeat_engine import CheckpointError, Dtype, ModelConfig, World, engine_class
from offbeat_engine.testing import make_tiny_model

pytestmark = pytest.mark.spawns
# As DeepSeek-V3: its router has a bias that chooses experts, and no gradient.
BIASED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
}


def make(world, path, name="fsdp2", **settings):
    kind = engine_class(name)
    engine = kind(kind.Config(model=ModelConfig(path=path), **settings), world)
    engine.init_model()
    return engine


def said_of(world, path, name, folder):
    with pytest.raises(CheckpointError) as caught:
        make(world, path, name).export_huggingface(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", ["fsdp2", "megatron"])
def test_a_folder_of_other_things_is_not_replaced(tiny, tmp_path, two_ranks, name):
    (tmp_path / "notes.txt").write_text("kept")
    left, right = two_ranks.run(said_of, tiny, name, str(tmp_path))
    assert left == right
    assert "is no model and would be lost" in left
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]


def test_nor_is_the_one_that_the_model_was_read_from(tmp_path):
    path = make_tiny_model(tmp_path)
    assert "the one that the model was read from" in said_of(World(), path, "fsdp2", str(tmp_path / "." / ""))


def test_an_older_export_and_an_empty_folder_are(tiny, tmp_path):
    engine = make(World(), tiny)
    (tmp_path / "out").mkdir()
    for _ in range(2):
        engine.export_huggingface(str(tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").is_file()


def exported(world, path, out):
    engine = make(world, path, dtype=Dtype.BFLOAT16)
    engine.export_huggingface(out)
    weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
    assert all(weights[spec.name].dtype is spec.dtype for spec in engine.weight_manifest())
    return weights


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_a_bias_that_chooses_experts_is_not_rounded(tmp_path, two_ranks):
    path = make_tiny_model(tmp_path / "model", family="glm4_moe", **BIASED)
    file = Path(path) / "model.safetensors"
    weights = {**load_file(file), BIAS: 5 + torch.rand(8)}
    save_file(weights, file, metadata={"format": "pt"})
    found, _ = two_ranks.run(exported, path, str(tmp_path / "out"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    for each in (found, written):
        assert torch.equal(each[BIAS], weights[BIAS])
    assert {tensor.dtype for name, tensor in written.items() if name != BIAS} == {torch.bfloat16}


TOKENIZERS = [
    "tokenizer.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
    "qwen.tiktoken",
    "tokenization_own.py",
]


def test_a_tokenizer_goes_along_in_any_form(tmp_path):
    path = Path(make_tiny_model(tmp_path / "model"))
    for name in TOKENIZERS:
        (path / name).write_text(name)
    make(World(), str(path)).export_huggingface(str(tmp_path / "out"))
    assert [(tmp_path / "out" / name).read_text() for name in TOKENIZERS] == TOKENIZERS
