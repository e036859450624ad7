"""Values for the weights of one rank: it reads its own blocks from the safetensors, and nothing else."""

# transformers' configs are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.errors import ConfigError
from offbeat_engine.megatron import families
from offbeat_engine.toolkit.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat_engine.config import ModelConfig
    from offbeat_engine.megatron.families import Shape
    from offbeat_engine.megatron.held import Held

_MAX_NAMED = 5
# What older transformers wrote and nobody reads.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


def hf_config(model: ModelConfig) -> Any:  # noqa: ANN401
    """Return the config of a model's folder.

    Raises:
        ConfigError: transformers makes none of it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model.path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise ConfigError(f"no model in {model.path!r}: expected a Hugging Face folder ({said})") from error


def check_files(model: ModelConfig, shape: Shape) -> WeightFiles:
    """Hold what the headers of a folder's safetensors say against the family's table; reads no weights.

    Raises:
        ConfigError: a file is damaged, or a weight is missing, one too many, or of another shape.
    """
    try:
        files = WeightFiles.find(Path(model.path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the weights in {model.path!r} cannot be used: {error}") from error
    if files is None:
        raise ConfigError(f"no safetensors in {model.path!r}; this engine reads no other weights")
    wanted = {
        name: whole
        for entry, layer, expert in families.entries(shape, model.head)
        for name, whole in zip(
            families.names(entry, layer, expert), families.whole_shapes(entry, shape), strict=True
        )
    }
    lacking = [name for name in wanted if name not in files.shapes and not is_drawn(name)]
    known = {"lm_head.weight"} if shape.tied or model.head == "value" else set[str]()
    extra = [name for name in files.shapes if not (name in wanted or name in known or _IGNORED.search(name))]
    odd = [name for name, whole in wanted.items() if files.shapes.get(name, whole) != whole]
    for names, what in (
        (lacking, "lack"),
        (extra, "hold more than the family has:"),
        (odd, "have other shapes than config.json says:"),
    ):
        if names:
            some = ", ".join(f"`{name}`" for name in names[:_MAX_NAMED])
            raise ConfigError(
                f"the weights in {model.path!r} {what} {len(names)} weights, such as {some}; is config.json of another model?"
            )
    return files


def is_drawn(name: str) -> bool:
    """Return whether a folder need not hold this weight: a value head is usually begun from a language model."""
    return name.startswith("score.")


def fill(held: Sequence[Held], files: WeightFiles, model: ModelConfig, spread: float) -> None:
    """Read this rank's blocks into its parameters; a value head that no file holds is drawn from the seed.

    Raises:
        OSError: a file cannot be read.
    """
    with torch.no_grad():
        for one in held:
            named = {block.name for block in one.blocks}
            if not named <= files.shapes.keys():
                one.param.copy_(drawn(tuple(one.param.shape), model.seed, spread))
                continue
            if one.param.dim():
                one.param.zero_()  # rows that fill up the vocabulary
            with files.opened(named) as read:
                for block in one.blocks:
                    rows = slice(block.offsets[0], block.offsets[0] + block.sizes[0])
                    columns = (
                        None
                        if len(block.sizes) == 1
                        else slice(block.offsets[1], block.offsets[1] + block.sizes[1])
                    )
                    block.of(one.param).copy_(read(block.name, rows.start, rows.stop, columns))


def drawn(shape: tuple[int, ...], seed: int, spread: float) -> torch.Tensor:
    """Return a value head's weight as every rank draws it; its bias is zero."""
    draw = torch.Generator().manual_seed(seed)
    whole = torch.zeros(shape)
    if whole.dim() > 1:
        whole.normal_(0.0, spread, generator=draw)
    return whole
