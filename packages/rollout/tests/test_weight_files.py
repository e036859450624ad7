from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from offbeat_rollout import ConfigError
from offbeat_rollout.interface import eos_token_ids
from offbeat_rollout.testing import make_tiny_model
from offbeat_rollout.toolkit.weight_files import folder_specs


def write_index(folder, places):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_the_index_says_which_weights_are_the_model_s(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 10, "num_nextn_predict_layers": 1}')
    save_file(
        {
            "b": torch.zeros(2, 3),
            "odd": torch.zeros(0, 7),
            "unlisted": torch.zeros(9),
            "model.layers.10.w": torch.zeros(1),
            "mtp.0": torch.zeros(1),
        },
        tmp_path / "model-1.safetensors",
        {"format": "pt"},
    )
    save_file(
        {
            "a": torch.zeros(4, dtype=torch.int64),
            "s": torch.tensor(1.0),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        },
        tmp_path / "model-2.safetensors",
    )
    save_file({"layers.0.wq": torch.zeros(5)}, tmp_path / "consolidated.safetensors")
    save_file({"lora_A": torch.zeros(5)}, tmp_path / "adapter_model.safetensors")
    places = dict.fromkeys(("b", "odd", "model.layers.10.w", "mtp.0"), "model-1.safetensors")
    places |= dict.fromkeys(("a", "s", "model.layers.0.self_attn.rotary_emb.inv_freq"), "model-2.safetensors")
    write_index(tmp_path, places)
    assert folder_specs(str(tmp_path), "bfloat16") == [
        ("a", (4,), "int64"),
        ("b", (2, 3), "bfloat16"),
        ("odd", (0, 7), "bfloat16"),
        ("s", (), "bfloat16"),
    ]


@pytest.mark.parametrize("max_shard_size", ["50GB", "50KB"])
def test_a_model_folder_with_a_second_set_of_weights(tmp_path, max_shard_size):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "whole"))
    folder = tmp_path / "saved"
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    assert (folder / "model.safetensors.index.json").is_file() == (max_shard_size == "50KB")
    save_file({"tok_embeddings.weight": torch.zeros(5)}, folder / "consolidated.safetensors")
    assert folder_specs(str(folder), "float32") == sorted(
        (name, tuple(tensor.shape), "float32")
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied, so it is saved once
    )


def test_it_needs_no_torch(tmp_path):
    path = make_tiny_model(tmp_path)
    code = (
        "import sys; from offbeat_rollout.toolkit.weight_files import folder_specs; "
        f"assert folder_specs({path!r}, 'bfloat16'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_what_is_no_model_is_said_so(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        folder_specs(str(tmp_path), "float32")
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor .*index\.json; .*save_pretrained"):
        folder_specs(str(tmp_path), "float32")
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"model\.safetensors' cannot be read .*header too small"):
        folder_specs(str(tmp_path), "float32")
    (tmp_path / "model.safetensors").unlink()
    write_index(tmp_path, {"w": "model-1.safetensors"})
    with pytest.raises(ConfigError, match=r"model-1\.safetensors' cannot be read .*No such file"):
        folder_specs(str(tmp_path), "float32")
    save_file({"v": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(
        ConfigError, match=r"model-1\.safetensors' cannot be read .*does not contain tensor w"
    ):
        folder_specs(str(tmp_path), "float32")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json' is no index .*weight_map"):
        folder_specs(str(tmp_path), "float32")


@pytest.mark.parametrize("damaged", ["{", "[]"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_of_settings_that_is_damaged_is_named(tmp_path, name, damaged):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(damaged)
    with pytest.raises(ConfigError, match=rf"cannot read the {name} in "):
        eos_token_ids(str(tmp_path))
    if name == "config.json":
        with pytest.raises(ConfigError, match=r"cannot read the config\.json in "):
            folder_specs(str(tmp_path), "float32")
