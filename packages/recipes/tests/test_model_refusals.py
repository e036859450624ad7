"""What a config.json alone forbids is refused by the plan, by its setting and with what helps: nothing has started then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from offbeat_engine.testing.models import is_computed
from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.planning.plan import plan_run

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip
ABSENT = object()
NO_HEADS = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), ABSENT)
PADDED = ("engine.packing=false",)
HF = ("rollout=hf", *PADDED)


def planned(folder: Path, family: str, shape: dict[str, Any], settings: tuple[str, ...]) -> dict[str, str]:
    """What the plan refuses of a run with a folder of nothing but a config.json, by setting; what is ABSENT is left out."""
    from transformers import AutoConfig

    own = type(AutoConfig.for_model(family))
    told = {key: value for key, value in {**SHAPE, **shape}.items() if value is not ABSENT}
    given = {key: value for key, value in told.items() if not is_computed(own, key)}
    AutoConfig.for_model(family, **given).save_pretrained(folder)
    config = compose_run([f"model.path={folder}", "model.random_init=true", *settings])
    refused: dict[str, str] = {}
    for item in plan_run(config, gather_facts(config)).refusals:
        refused[item.setting] = f"{refused.get(item.setting, '')} {item.reason}; {item.remedy}"
    return refused


@pytest.mark.parametrize(
    ("family", "shape", "settings", "setting", "says"),
    [
        ("granite", {"logits_scaling": 8.0}, (), "model.path", "`logits_scaling`: 8.0"),
        ("falcon_h1", {"lm_head_multiplier": 0.3}, PADDED, "model.path", "`lm_head_multiplier`: 0.3"),
        ("gemma2", {}, PADDED, "model.path", "`final_logit_softcapping`: 30.0"),
        ("gemma2", {"final_logit_softcapping": None}, (), "engine.attention", "set `attention: eager`"),
        ("gpt_oss", {"num_local_experts": 2}, (), "engine.attention", "set `attention: eager` and `packing: false`"),
        ("mamba", NO_HEADS, (), "engine.packing", "layers of type linear_attention, which would mix tokens"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, (), "engine.packing", "set `packing: false`"),
        ("llama4_text", {"num_local_experts": 2}, (), "engine.packing", "layers of type chunked_attention"),
        ("stablelm", {}, (), "engine.packing", "StableLmForCausalLM has its own attention; set `packing: false`"),
        ("phi3", {"max_position_embeddings": 64, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
         (), "engine.max_sequence_tokens", "beyond 32 tokens"),
        ("qwen2", {}, ("engine.sequence_parallel_size=3", "engine.num_ranks=3"), "engine.sequence_parallel_size",
         "must divide the 4 attention heads"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, HF, "rollout", "the hf adapter does not do ['conv']"),
        ("mistral", {"sliding_window": 7}, HF, "rollout", "a window of 7 tokens"),
        ("qwen2", {"max_position_embeddings": 16}, (), "rollout.max_model_len", "made for 16 positions"),
        ("t5", {}, (), "model.path", "T5Config"),
        ("qwen2", {"hidden_act": "nonsense"}, (), "model.path", "KeyError: 'nonsense'"),
        ("qwen2", {"num_attention_heads": 0}, (), "model.path", "ZeroDivisionError"),
        ("qwen2", {"num_key_value_heads": 3}, (), "model.path", "4 attention heads that cannot share 3 key-value heads"),
        ("phi3", {"pad_token_id": 99}, (), "model.path", "AssertionError"),
    ],
)  # fmt: skip
def test_a_plan_refuses_a_model_by_its_config(
    tmp_path: Path, family: str, shape: dict[str, Any], settings: tuple[str, ...], setting: str, says: str
):
    assert says in planned(tmp_path, family, shape, settings)[setting]


@pytest.mark.parametrize("family", ["qwen2", "granite"])
def test_a_plan_refuses_none_that_can_be_used(tmp_path: Path, family: str):
    refused = planned(
        tmp_path, family, {"logits_scaling": 1.0} if family == "granite" else {}, ("rollout=hf",)
    )
    assert not refused.keys() & {
        "engine.attention",
        "engine.packing",
        "engine.max_sequence_tokens",
        "rollout",
    }
    assert "changes its logits" not in refused.get("model.path", "")
