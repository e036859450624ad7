"""The work that both sides do: a model folder and prompts, made on the spot from fixed seeds.

Both sides start from the same folder. Its tokenizer has no end token: no sample can end early, so every completion has
its full length, on both sides and in every step; unless the work gives `end_tokens`.
"""

# transformers and tokenizers are typed in part.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PAD, UNK = "<pad>", "<unk>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One optimizer step on `prompts_per_step` * `group_size` completions, the same on both sides.

    `end_tokens` of the vocabulary end a completion. The weights are random, so each token is one of them with about
    the same chance: lengths are geometric, up to `completion_tokens`.
    """

    prompts_per_step: int = 16
    group_size: int = 16
    prompt_tokens: int = 16
    completion_tokens: int = 32
    end_tokens: int = 0
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    seed: int = 0

    @property
    def completions(self) -> int:
        """Completions of one step."""
        return self.prompts_per_step * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Qwen2 model with tied embeddings; `vocab` counts the padding and unknown tokens."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


SHAPES = {
    "small": Shape(vocab=32, hidden=128, layers=2, heads=4, kv_heads=4, intermediate=256),
    "medium": Shape(vocab=384, hidden=384, layers=4, heads=6, kv_heads=2, intermediate=1536),
}


def make_model(folder: Path, shape: Shape, work: Work) -> int:
    """Write weights drawn from `work.seed` and a character tokenizer to `folder`; return the parameters' number."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    letters = _alphabet(shape.vocab - 2)
    core = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate((PAD, UNK, *letters))}, unk_token=UNK)
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, unk_token=UNK, padding_side="left"
    )
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(work.seed)
        model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Without these words transformers gives every Qwen2 tokenizer an end token of its own.
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": None}))
    if work.end_tokens:
        ends = list(range(shape.vocab - work.end_tokens, shape.vocab))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return sum(parameter.numel() for parameter in model.parameters())


def write_prompts(path: Path, work: Work, steps: int) -> None:
    """Write enough different prompts for `steps` steps, one JSON object a line."""
    dice = random.Random(work.seed)
    rows = [
        {"prompt": "".join(dice.choices(string.ascii_lowercase, k=work.prompt_tokens))}
        for _ in range(work.prompts_per_step * steps)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _alphabet(count: int) -> str:
    """Return `count` different printable characters, lower-case letters first."""
    more = (chr(code) for code in range(0xC0, 0x400) if chr(code).isalpha())
    letters = string.ascii_lowercase + string.digits + string.ascii_uppercase + "".join(more)
    assert len(letters) >= count
    return letters[:count]
