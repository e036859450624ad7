"""Tiny models and batches, drawn from a seed."""

# transformers' configs are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.batch import train_batch

if TYPE_CHECKING:
    from offbeat_engine.batch import TrainBatch


def make_tiny_model(
    path: str | Path,
    *,
    family: str = "qwen2",
    vocab_size: int = 64,
    hidden: int = 32,
    layers: int = 2,
    seed: int = 0,
    **config: Any,  # noqa: ANN401 whatever the family's config takes
) -> str:
    """Write a Hugging Face folder with random weights (config and safetensors, no tokenizer); return its path.

    Args:
        path: the folder to make.
        family: a transformers model type with a causal language model, such as "qwen2", "llama" or "qwen3".
        vocab_size: tokens.
        hidden: hidden size, a multiple of 4; there are 4 heads on 2 key-value heads.
        layers: decoder layers.
        seed: of the weights.
        config: further settings of the family's config, which win over the above.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **shape), dtype=torch.float32
        )
    # At the usual 0.02 a tiny model is all but uniform, and a wrong one would look right.
    for param in model.parameters():
        if param.dim() > 1:
            param.data.mul_(5.0)
    model.save_pretrained(Path(path))
    return str(path)


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
