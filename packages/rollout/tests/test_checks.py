"""What every adapter refuses by its settings and a model's config.json."""

import json
import re

import pytest

from offbeat_rollout import ConfigError, RolloutConfig
from offbeat_rollout.hf import HfEngine
from offbeat_rollout.interface import check_config
from offbeat_rollout.sglang import SglangConfig, SglangEngine
from offbeat_rollout.vllm import VllmConfig, VllmEngine

ADAPTERS = [(HfEngine, RolloutConfig), (VllmEngine, VllmConfig), (SglangEngine, SglangConfig)]
LIMIT = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter[0].__name__)
@pytest.mark.parametrize(
    "said",
    [
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LIMIT}},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope", **LIMIT}, "other": None}},
        {"text_config": {"rope_scaling": {"type": "su"}, **LIMIT}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
    ],
    ids=["longrope", "by kind of layer", "as files were before", "dynamic"],
)
def test_frequencies_that_follow_the_longest_sequence_are_refused(tmp_path, adapter, said):
    """vLLM was 5 nats from the plain forward then, at every length, and hf in short rows beside long ones."""
    engine, config = adapter
    (tmp_path / "config.json").write_text(json.dumps(said))
    fits, longer = (config(model_path=str(tmp_path), max_model_len=tokens) for tokens in (64, 65))
    check_config(fits, engine.capabilities())
    with pytest.raises(ConfigError, match=r"`max_model_len` is 65, .* set it to 64 at most"):
        check_config(longer, engine.capabilities())


@pytest.mark.parametrize("rope", [{"rope_theta": 1e4}, {"rope_type": "yarn", "factor": 4.0, **LIMIT}, None])
def test_other_frequencies_are_taken(tmp_path, rope):
    (tmp_path / "config.json").write_text(
        json.dumps({"rope_parameters": rope, "max_position_embeddings": 64})
    )
    check_config(VllmConfig(model_path=str(tmp_path), max_model_len=65), VllmEngine.capabilities())


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_config_that_is_none_is_refused_by_its_folder(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=re.escape(f"cannot read the config.json in '{tmp_path}'")):
        check_config(VllmConfig(model_path=str(tmp_path)), VllmEngine.capabilities())
