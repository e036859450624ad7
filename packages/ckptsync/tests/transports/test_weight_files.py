"""Which tensors a model folder says are the model's."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.transports.disk import folder_specs
from offbeat_ckptsync.values import TensorSpec

FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def write_index(folder, places):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def spec(name, *shape, dtype="float32"):
    return TensorSpec(name=name, shape=shape, dtype=dtype)


def test_without_an_index_it_is_the_one_file_of_that_name(tmp_path):
    assert folder_specs(tmp_path) == ()
    save_file({"layers.0.wq": torch.zeros(5)}, tmp_path / "consolidated.safetensors")
    assert folder_specs(tmp_path) == ()
    save_file({"b": torch.zeros(2).bfloat16(), "a": torch.zeros(0, 3)}, tmp_path / "model.safetensors")
    assert folder_specs(tmp_path) == (spec("a", 0, 3), spec("b", 2, dtype="bfloat16"))


def test_the_index_says_it_and_what_no_trainer_exports_is_left_out(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "num_nextn_predict_layers": 1}')
    first = {"a": torch.zeros(1), FREQUENCIES: torch.zeros(2), "unlisted": torch.zeros(3)}
    second = {f"model.layers.{layer}.w": torch.zeros(layer + 1) for layer in range(3)}
    save_file(first, tmp_path / "model-1.safetensors")
    save_file(second, tmp_path / "model-2.safetensors")
    save_file({"layers.0.wq": torch.zeros(5)}, tmp_path / "consolidated.safetensors")
    places = {"a": "model-1.safetensors", FREQUENCIES: "model-1.safetensors"}
    write_index(tmp_path, places | dict.fromkeys(second, "model-2.safetensors"))
    assert folder_specs(tmp_path) == (spec("a", 1), spec("model.layers.0.w", 1), spec("model.layers.1.w", 2))


@pytest.mark.parametrize("damage", ["short file", "no file", "another name", "no index"])
def test_a_damaged_folder_is_refused_by_its_name(tmp_path, damage):
    if damage == "no index":
        (tmp_path / "model.safetensors.index.json").write_text("{}")
    else:
        write_index(tmp_path, {"w": "model-1.safetensors"})
    if damage == "short file":
        (tmp_path / "model-1.safetensors").write_bytes(b"short")
    if damage == "another name":
        save_file({"v": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(ManifestError, match=rf"{tmp_path.name}: the safetensors files or their index"):
        folder_specs(tmp_path)
