"""A character tokenizer and a tiny Qwen2-shaped model, made on the spot as an ordinary Hugging Face folder."""

# transformers and tokenizers are typed in part; this file is where Offbeat calls them for the tiny model.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportArgumentType=false

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from offbeat_recipes.errors import TaskError
from offbeat_recipes.models.whole import make_whole

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast, Qwen2Config

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
_SPECIALS = (PAD, EOS, UNK)


@dataclass(frozen=True, slots=True, kw_only=True)
class CharModelShape:
    """Everything that decides the folder but its seed. One token per character of `alphabet`, in order."""

    alphabet: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    initializer_range: float = 0.1
    rope_theta: float = 100.0
    max_positions: int = 512


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Return a fast tokenizer with one token per character of `alphabet`, after <pad>, <eos> and <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*_SPECIALS, *alphabet))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def folder_vocabulary(folder: Path) -> dict[str, int]:
    """Return the vocabulary of the tokenizer in `folder`; empty when it has none.

    Raises:
        TaskError: its file is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise TaskError(f"model.path: the tokenizer in {folder} cannot be read: {said}") from error


def char_model_config(shape: CharModelShape) -> Qwen2Config:
    """Return the configuration of the tiny model: tied embeddings, rotary positions, no dropout."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=len(_SPECIALS) + len(shape.alphabet),
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=_SPECIALS.index(PAD),
        eos_token_id=_SPECIALS.index(EOS),
        bos_token_id=None,
        dtype="float32",
    )


def char_model_folder(shape: CharModelShape, cache_dir: Path, seed: int) -> Path:
    """Return a folder with config, tokenizer and weights drawn from `seed`, making it where it is not there.

    The folder's name is a digest of shape and seed. It is written beside and renamed last: whoever finds it
    finds it whole.
    """
    digest = hashlib.sha256(json.dumps([asdict(shape), seed]).encode()).hexdigest()[:12]
    folder = cache_dir / f"char-model-{digest}"
    if folder.is_dir():
        return folder
    make_whole(folder, lambda beside: _write_model(shape, beside, seed))
    return folder


def _write_model(shape: CharModelShape, folder: Path, seed: int) -> None:
    import torch
    from transformers import Qwen2ForCausalLM

    with torch.random.fork_rng(devices=[]):  # the caller's random state is none of our business
        torch.manual_seed(seed)
        Qwen2ForCausalLM(char_model_config(shape)).save_pretrained(folder)
    char_tokenizer(shape.alphabet).save_pretrained(folder)
