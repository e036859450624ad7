"""A tiny model made on the spot, and log-probs computed the slow and obvious way."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' models are typed loosely.

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from offbeat_rollout.types import SamplingParams


def make_tiny_model(folder: Path | str, seed: int = 0, **changes: object) -> str:
    """Write a random Qwen2 of about 60,000 parameters to `folder` and return its path; `changes` go to its config.

    It has no tokenizer and no end-of-sequence token; weights are large enough that its choices are not uniform.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    settings: dict[str, object] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # head dimension 32, the smallest that vLLM does on CPU
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = Qwen2Config(**{**settings, **changes})  # pyright: ignore[reportArgumentType] # a plain mapping
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def reference_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams
) -> list[float]:
    """Return the log-prob of each of `token_ids` under `sampling`: one plain forward, one token at a time.

    Truncation is written token by token here, so that it shares nothing with the engines it judges.
    """
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *token_ids]], device=model.device)).logits[0].double()
    return [
        _logprob(logits[len(prompt_ids) - 1 + position].tolist(), token, sampling)
        for position, token in enumerate(token_ids)
    ]


def reference_experts(model: PreTrainedModel, token_ids: Sequence[int]) -> npt.NDArray[np.int16]:
    """Return the experts that the routers of a mixture choose for each of `token_ids` [N, L, K], in one plain forward."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*token_ids]]), output_router_logits=True).router_logits
    top_k = model.config.num_experts_per_tok
    return torch.stack([one.topk(top_k, -1).indices for one in logits], 1).to(torch.int16).numpy()


def write_tokenizer(folder: Path | str, vocab_size: int = 96) -> PreTrainedTokenizerFast:
    """Write a tokenizer of `vocab_size` tokens to `folder` and return it.

    A token is a character, a syllable, a byte that is no character alone, or "<end>", a special token, in turns.
    """
    from itertools import product

    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    halves = [
        "\u00c3",
        "\u00a9",
        "\u00bc",
    ]  # the bytes of two accented letters, as byte-level tokenizers spell them
    syllables = ["".join(pair) for pair in product("bdgklmnprst", "aeiou")]
    texts = ["<unk>", "<end>", *halves, *letters, *syllables, *map(str, range(vocab_size))][:vocab_size]
    core = Tokenizer(models.WordLevel({text: place for place, text in enumerate(texts)}, unk_token="<unk>"))
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<end>")
    made.save_pretrained(folder)
    return made


def _logprob(logits: list[float], token: int, sampling: SamplingParams) -> float:
    from math import exp, inf, log

    greedy = sampling.temperature == 0
    scaled = [value / (1.0 if greedy else sampling.temperature) for value in logits]
    top = max(scaled)
    allowed = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if not greedy and sampling.top_k != -1:
        allowed = allowed[: sampling.top_k]
    if not greedy and sampling.top_p < 1:
        total, mass, kept = sum(exp(scaled[i] - top) for i in allowed), 0.0, list[int]()
        for i in allowed:
            if mass >= sampling.top_p:
                break
            kept.append(i)
            mass += exp(scaled[i] - top) / total
        allowed = kept
    if token not in allowed:
        return -inf
    return scaled[token] - top - log(sum(exp(scaled[i] - top) for i in allowed))
