"""A folder whose config ties the head to the embedding, and whose files hold a head all the same."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from offbeat_engine import ConfigError, ModelConfig, World
from offbeat_engine.megatron import MegatronConfig, MegatronEngine
from offbeat_engine.testing import make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None")  # megatron-core's own


def with_head(folder, factor):
    path = make_tiny_model(folder, family="qwen2")
    file = Path(path) / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * factor
    save_file(weights, file, metadata={"format": "pt"})
    return MegatronEngine(MegatronConfig(model=ModelConfig(path=path)), World())


def test_the_same_weights_are_one(tmp_path):
    with_head(tmp_path, 1.0).init_model()


def test_other_weights_are_refused_as_they_would_have_been_left_out(tmp_path):
    with pytest.raises(ConfigError, match="a probe token has"):
        with_head(tmp_path, 0.5).init_model()
