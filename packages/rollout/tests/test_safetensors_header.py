from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from offbeat_rollout import ConfigError
from offbeat_rollout.safetensors_header import folder_specs
from offbeat_rollout.testing import make_tiny_model


def test_specs_come_from_all_files_in_the_dtype_served(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file(
        {"b": torch.zeros(2, 3), "odd": torch.zeros(0, 7)}, tmp_path / "model-1.safetensors", {"format": "pt"}
    )
    save_file(
        {"a": torch.zeros(4, dtype=torch.int64), "s": torch.tensor(1.0)}, tmp_path / "model-2.safetensors"
    )
    assert folder_specs(str(tmp_path), "bfloat16") == [
        ("a", (4,), "int64"),
        ("b", (2, 3), "bfloat16"),
        ("odd", (0, 7), "bfloat16"),
        ("s", (), "bfloat16"),
    ]


def test_a_model_folder(tmp_path):
    path = make_tiny_model(tmp_path)
    names = [name for name, _, _ in folder_specs(path, "float32")]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_what_is_no_model_is_said_so(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        folder_specs(str(tmp_path), "float32")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="save_pretrained"):
        folder_specs(str(tmp_path), "float32")
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match="no safetensors file"):
        folder_specs(str(tmp_path), "float32")
    (tmp_path / "model.safetensors").write_bytes((5).to_bytes(8, "little") + b"{...}")
    with pytest.raises(ConfigError, match="damaged header"):
        folder_specs(str(tmp_path), "float32")
