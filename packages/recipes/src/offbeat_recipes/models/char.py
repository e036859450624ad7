"""A character tokenizer and a tiny Qwen2-shaped model, made on the spot as an ordinary Hugging Face folder."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportArgumentType=false

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from offbeat_recipes.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast, Qwen2Config


def make_whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a folder beside `folder` and rename it last; whoever finds `folder` finds it whole.

    Another process may make the same folder at the same time: the first one wins, the other's is dropped.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)  # of a killed process that had the same id
    beside.mkdir(parents=True)
    try:
        fill(beside)
        _put(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # gone already if it was put in place


def random_model_folder(shape: Path, cache_dir: Path, seed: int, *, trust_remote_code: bool = False) -> Path:
    """Return a Hugging Face folder with the config and tokenizer of `shape` and weights drawn from `seed`.

    Made in `cache_dir` where it is not there yet; two calls with one seed give the same weights.
    """
    folder = cache_dir / f"random-{seed}"
    if folder.exists():
        return folder

    def fill(beside: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
            made = cast("Any", AutoConfig).from_pretrained(shape, **trust)
            AutoModelForCausalLM.from_config(made, **trust).save_pretrained(beside)
        for file in shape.iterdir():
            if "token" in file.name or file.suffix in {".jinja", ".model"}:
                shutil.copy(file, beside)

    make_whole(folder, fill)
    return folder


def _put(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


# transformers and tokenizers are typed in part; this file is where Offbeat calls them for the tiny model.


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
