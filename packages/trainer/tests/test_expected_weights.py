"""What a training engine hands out is what vLLM's side of a sync expects, name by name, in every dtype."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat_ckptsync.adapters.vllm.adapter import expected_manifest
from offbeat_engine import Dtype, Fsdp2Config, ModelConfig, World
from offbeat_engine.fsdp2 import Fsdp2Engine

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip


ERNIE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1,
}  # fmt: skip
AFMOE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "num_dense_layers": 1, "n_group": 1, "topk_group": 1, "layer_types": ["full_attention"] * 2,
}  # fmt: skip
FLOAT32 = {
    "deepseek_v3": (SHAPE, {"e_score_correction_bias"}),
    "ernie4_5_moe": (ERNIE, {"e_score_correction_bias", "gate.weight"}),
    "afmoe": (AFMOE, {"expert_bias"}),
}


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("family", FLOAT32)
def test_what_a_router_chooses_by_stays_in_float32(tmp_path, family, dtype):
    shape, unrounded = FLOAT32[family]
    path = str(tmp_path / "model")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).save_pretrained(path)
    engine = Fsdp2Engine(Fsdp2Config(model=ModelConfig(path=path), dtype=dtype), World())
    engine.init_model()
    sent = {spec.name: str(spec.dtype).removeprefix("torch.") for spec in engine.weight_manifest()}
    served = SimpleNamespace(
        hf_config=AutoConfig.from_pretrained(path),
        dtype=getattr(torch, dtype),
        model=path,
        quantization=None,
    )
    expected = expected_manifest(served)
    assert sent == {spec.name: spec.dtype for spec in expected.specs}
    assert {*sent.values()} == {"float32", dtype}
    if dtype == Dtype.BFLOAT16:
        left = {name for name, sent_dtype in sent.items() if sent_dtype == "float32"}
        assert {next((end for end in unrounded if name.endswith(end)), name) for name in left} == unrounded
