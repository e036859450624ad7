"""Adapters on models with a mixture of experts: those go to the dense layers beside the experts."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from offbeat_engine import (
    ConfigError,
    Fsdp2Config,
    LoraConfig,
    LoraExport,
    ModelConfig,
    OptimizerConfig,
    SftLoss,
    World,
)
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_engine.testing.reference import reference_logprobs

pytest.importorskip("peft")

BATCHES = [random_batch(9, seed=seed) for seed in range(3)]
LORA = LoraConfig(rank=3, alpha=12.0)


def make_engine(path, lora=LORA):
    config = Fsdp2Config(
        model=ModelConfig(path=path),
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-4, max_grad_norm=0.0),
        micro_batch_tokens=60,
        lora=lora,
    )
    engine = Fsdp2Engine(config, World())
    engine.init_model()
    engine.set_loss_fn(SftLoss())
    return engine


def train(engine, batches):
    with engine.train_mode():
        for batch in batches:
            engine.optimizer_zero_grad()
            engine.forward_backward_step(engine.shard_data(batch))
            engine.optimizer_step()


def test_a_mixture_of_experts_leaves_merged_under_its_files_names(tmp_path):
    path = make_tiny_model(tmp_path, family="mixtral", num_local_experts=2)
    engine = make_engine(path)
    train(engine, BATCHES[:2])
    merged = {name: tensor.clone() for name, tensor in engine.named_weights()}
    source = load_file(f"{path}/model.safetensors")
    assert merged.keys() == source.keys()
    changed = {name.split(".")[-2] for name in source if not torch.equal(merged[name], source[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}


MIXED = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


@pytest.fixture(scope="module", params=MIXED)
def mixed(request, tmp_path_factory):
    """Models in which some layers are dense, or have a shared expert, under the names that fused experts once had."""
    path = tmp_path_factory.mktemp("mixed") / request.param
    return make_tiny_model(path, family=request.param, tie_word_embeddings=False, **MIXED[request.param])


def test_merged_weights_of_dense_layers_beside_experts_are_those_that_were_trained(mixed, tmp_path):
    engine = make_engine(mixed)
    train(engine, BATCHES)
    assert {spec.name for spec in engine.weight_manifest()} == load_file(f"{mixed}/model.safetensors").keys()
    changed = {
        name
        for name, tensor in engine.named_weights()
        if not torch.equal(tensor, load_file(f"{mixed}/model.safetensors")[name])
    }
    assert any(name.endswith("layers.0.mlp.gate_proj.weight") for name in changed)
    with engine.eval_mode():
        own, _ = engine.forward_backward_step(BATCHES[0], forward_only=True)
    engine.export_huggingface(str(tmp_path / "out"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = reference_logprobs(exported, BATCHES[0])["logprobs"].detach()
    assert_close(own["logprobs"], expected, rtol=0, atol=1e-5)


def test_an_adapter_that_peft_would_lay_over_other_weights_is_refused(mixed):
    with pytest.raises(ConfigError, match="over the fused experts"):
        make_engine(mixed, lora=replace(LORA, export=LoraExport.ADAPTER))
