"""Tiny models and batches, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.batch import train_batch
from offbeat_engine.toolkit.hf.probing import without_bars

if TYPE_CHECKING:
    from offbeat_engine.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of model of the conformance suite: a transformers model type and what is special in its config."""

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    dense: bool = True


_UNTIED = {"tie_word_embeddings": False}
_ADAPTIVE_POSITIONS = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="qwen2", model_type="qwen2"),
        Family(name="qwen2_untied", model_type="qwen2", settings=_UNTIED),
        # Rotary embeddings tell differences of positions only, so running on through a packed row would not show;
        # scaled ones that adapt to the largest position do, where all sequences fit below the limit.
        Family(name="llama", model_type="llama", settings={**_UNTIED, **_ADAPTIVE_POSITIONS}),
        Family(name="llama_tied", model_type="llama"),
        Family(name="qwen3", model_type="qwen3"),
        # Gemma scales its embeddings and has heads wider than hidden / heads.
        Family(name="gemma", model_type="gemma", settings={"head_dim": 16}),
        # A window shorter than the sequences: attention that forgets it shows.
        Family(name="mistral", model_type="mistral", settings={**_UNTIED, "sliding_window": 7}),
        Family(
            name="mixtral",
            model_type="mixtral",
            settings={**_UNTIED, "num_local_experts": 4, "num_experts_per_tok": 2},
            dense=False,
        ),
        Family(
            name="qwen3_moe",
            model_type="qwen3_moe",
            settings={**_UNTIED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            dense=False,
        ),
    )
}
"""The families of the conformance suite: dense and mixture of experts, tied and untied embeddings."""


def make_tiny_model(
    path: str | Path,
    *,
    family: str = "qwen2",
    head: str = "lm",
    vocab_size: int = 64,
    hidden: int = 32,
    seed: int = 0,
    **config: Any,
) -> str:
    """Write a Hugging Face folder `path` with random weights (config and safetensors, no tokenizer); return its path.

    Args:
        path: where.
        family: a transformers model type with a causal language model, such as "qwen2", "llama" or "qwen3".
        head: "lm", or "value" for a token classifier with one label.
        vocab_size: tokens.
        hidden: hidden size, a multiple of 4; there are 4 heads on 2 key-value heads.
        seed: of the weights.
        config: further settings of the family's config, which win over the above; `layers` (2) are its layers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": config.pop("layers", 2),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **({"num_labels": 1} if head == "value" else {}),
        **config,
    }
    auto: Any = AutoModelForTokenClassification if head == "value" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), without_bars():
        torch.manual_seed(seed)
        own = type(AutoConfig.for_model(family))
        shape = {key: value for key, value in shape.items() if not is_computed(own, key)}
        model: Any = auto.from_config(AutoConfig.for_model(family, **shape), dtype=torch.float32)
        for param in model.parameters():
            _exaggerate(param.data)
        model.save_pretrained(Path(path))
    return str(path)


def is_computed(config_class: Any, key: str) -> bool:
    """Return whether the family computes `key` from other settings, so that it cannot be set."""
    place = getattr(config_class, config_class.attribute_map.get(key, key), None)
    return isinstance(place, property) and place.fset is None


def _exaggerate(weight: torch.Tensor) -> None:
    """Make a fresh weight one that shows mistakes.

    At the usual 0.02 a tiny model is all but uniform, and biases of zero and norms of one are all the same: a wrong
    one would look right.
    """
    if weight.dim() > 1:
        weight.mul_(5.0)
    else:
        weight.add_(torch.randn_like(weight), alpha=0.1)


def random_batch(
    num_sequences: int, *, vocab_size: int = 64, max_tokens: int = 24, seed: int = 0, min_tokens: int = 2
) -> TrainBatch:
    """Draw sequences of `min_tokens`..`max_tokens` tokens with loss on a random tail of each, and temperatures."""
    draw = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(min_tokens, max_tokens + 1, (num_sequences,), generator=draw)
    prompts_B = 1 + (torch.rand(num_sequences, generator=draw) * (lengths_B - 1)).long()
    position_T = torch.arange(max_tokens)
    real_BT = position_T[None] < lengths_B[:, None]
    ids_BT = torch.randint(3, vocab_size, (num_sequences, max_tokens), generator=draw)
    return train_batch(
        input_ids=torch.where(real_BT, ids_BT, 0),
        lengths=lengths_B,
        loss_mask=real_BT & (position_T[None] >= prompts_B[:, None]),
        temperature=0.5 + torch.rand(num_sequences, generator=draw),
    )


def scored_batch(seed: int, num_sequences: int = 9) -> TrainBatch:
    """Return a `random_batch` of the suite: with a weight for each token, a target for each value, and a silent row.

    `advantages` are positive, so that the loss is a sum without cancellation and can be held to 1e-6. The last
    sequence has nothing under its mask.
    """
    batch = random_batch(num_sequences, seed=seed, min_tokens=3)
    draw = torch.Generator().manual_seed(1000 + seed)
    shape = batch["input_ids"].shape
    batch["advantages"] = 0.5 + torch.rand(shape, generator=draw)
    batch["returns"] = 3.0 + torch.randn(shape, generator=draw)
    batch["loss_mask"][-1] = False
    return batch
