"""Other models than the tiny Qwen2 of `test_engine`, each in a server of its own, through the contract and an update."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from offbeat_rollout.sglang import SglangConfig, SglangEngine
from offbeat_rollout.testing import (
    Subject,
    make_tiny_model,
    reference_experts,
    reference_logprobs,
    rollout_contract,
    write_tokenizer,
)

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.deep,
    pytest.mark.sglang,
]

VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaConfig(**SHAPE, attention_bias=True),
    "llama, on two ranks": lambda: LlamaConfig(**SHAPE, attention_bias=True),
    "llama, tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "qwen3, tied, on two ranks": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3, experts": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS),
    # On a CPU SGLang fills the experts of several ranks up to 32 rows each.
    "qwen3, experts on two ranks": lambda: Qwen3MoeConfig(
        **SHAPE, **{**EXPERTS, "moe_intermediate_size": 64}
    ),
    # SGLang's Mixtral has the hidden size shared out among heads, whatever its config says.
    "mixtral": lambda: MixtralConfig(**{**SHAPE, "head_dim": 16}, num_local_experts=4, num_experts_per_tok=2),
}
MIXTURES = ("qwen3, experts", "qwen3, experts on two ranks", "mixtral")


def make_model(folder: Path, family: str, dtype: torch.dtype) -> str:
    if family == "qwen2, tied":
        make_tiny_model(folder)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


KINDS = [
    ("llama", "float32"),
    ("llama, on two ranks", "float32"),
    ("qwen3, tied, on two ranks", "float32"),
    ("llama, tied", "float32"),
    ("qwen3", "float32"),
    ("qwen3, experts", "float32"),
    ("qwen3, experts on two ranks", "float32"),
    ("mixtral", "float32"),
    ("qwen2, tied", "float32"),
    ("qwen2, tied", "bfloat16"),
    # Never run: no GPU was there.
    pytest.param(("llama", "float32", "cuda"), marks=pytest.mark.gpu(1)),
    pytest.param(("llama, on two ranks", "float32", "cuda"), marks=pytest.mark.gpu(2)),
    pytest.param(("qwen2, tied", "bfloat16", "cuda"), marks=pytest.mark.gpu(1)),
]
# Each sum of a layer is rounded to eight bits; these weights are ten times as large as those of real models.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=KINDS, ids=" ".join)
async def subject(request, tmp_path_factory):
    family, dtype, *device = request.param
    path = make_model(tmp_path_factory.mktemp("model"), family, getattr(torch, dtype))
    engine = SglangEngine(
        SglangConfig(
            model_path=path,
            dtype=dtype,
            device=device[0] if device else "cpu",
            gpu_memory_fraction=0.2,
            max_model_len=512,
            max_num_seqs=64,
            kv_cache_gib=0.25,
            stop_strings=True,
            record_experts=family in MIXTURES,
            start_timeout_s=600,
            tensor_parallel_size=2 if "on two ranks" in family else 1,
        )
    )
    await engine.start()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    yield Subject(
        engine=engine,
        vocab_size=VOCAB,
        logprobs=lambda prompt, tokens, sampling: reference_logprobs(model, prompt, tokens, sampling),
        tolerance=TOLERANCE[dtype],
        same_bits=False,
        decode=AutoTokenizer.from_pretrained(path).decode,
        experts=lambda ids: reference_experts(model, ids),
    )
    await engine.stop()


@pytest.mark.parametrize("check", rollout_contract)
async def test_contract(check, subject):
    await rollout_contract[check](subject)


async def test_new_weights_are_served(subject, tmp_path, load_folder):
    path = subject.engine.config.model_path
    weights = load_file(f"{path}/model.safetensors")
    for tensor in weights.values():
        tensor += 0.02 * torch.randn(tensor.shape).to(tensor.dtype)
    shutil.copytree(path, tmp_path / "new")
    save_file(weights, tmp_path / "new" / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    await load_folder(subject.engine, tmp_path / "new", 1)
    asked = subject.request(seed=9, max_tokens=24)
    done = await subject.engine.generate(asked)
    assert set(done.policy_versions) == {1}
    expected = reference_logprobs(model, asked.prompt_ids, done.token_ids.tolist(), asked.sampling)
    assert max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)) <= subject.tolerance
