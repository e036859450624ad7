"""Weights that are not trained, chosen by patterns over their Hugging Face names."""

# transformers' models are untyped here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2.weights import exported


def freeze(hf: Any, patterns: tuple[str, ...]) -> None:  # noqa: ANN401
    """Take every weight whose exported name matches one of `patterns` (fnmatch, upper and lower case differ).

    Raises:
        ConfigError: a pattern matches nothing or only a part of what the model holds as one weight, or nothing
            is left to train.
    """
    sources = exported(hf)
    names = [name for source in sources for name, _ in source.parts]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise ConfigError(
                f"`freeze`: no weight matches {pattern!r} (tied weights go by one name); near it are "
                + ", ".join(near)
            )
    for source in sources:
        frozen = [name for name, _ in source.parts if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if frozen and len(frozen) < len(source.parts):
            left = next(name for name, _ in source.parts if name not in frozen)
            raise ConfigError(
                f"`freeze`: the model holds `{frozen[0]}` and `{left}` as one weight; freeze both or neither"
            )
        if frozen and isinstance(source.tensor, torch.nn.Parameter):
            source.tensor.requires_grad_(False)
    if patterns and not any(param.requires_grad for param in hf.parameters()):
        raise ConfigError(f"`freeze`: {list(patterns)} leave nothing to train; name fewer weights")
