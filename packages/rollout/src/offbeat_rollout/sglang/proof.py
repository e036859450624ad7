"""What SGLang holds, against what it was given: the checksums of its `/weights_checker`, computed here from the tensors sent.

A server answers an update with success whatever names were in it. Its checker hashes each parameter where it lies: SHA-256 of
the bytes, the first eight of them (`weight_checker.py`, 0.5.23, on CPU). A parameter is a tensor of the checkpoint, several of them
one after the other (`_FUSED`, and `_STACKED`, expert after expert), or one filled up with rows of zeros to a multiple of 64
(embeddings). Whether that is true of a model is seen when its server has started: it must hold what is in the folder, or it is refused.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING

from offbeat_rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_STACKED = (
    ("w13_weight", ("gate_proj", "up_proj")),
    ("w13_weight", ("w1", "w3")),
    ("w2_weight", ("down_proj",)),
    ("w2_weight", ("w2",)),
)
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_ROWS = 64
_HEAD = "lm_head.weight"


def sources_of(held: Collection[str], given: Collection[str], *, tied: bool) -> dict[str, tuple[str, ...]]:
    """Return for each parameter that SGLang holds the tensors of the checkpoint it is made of.

    Raises:
        ConfigError: there is a parameter, or a tensor, that belongs to nothing.
    """
    sources = {name: _source(name, given) for name in held}
    unknown = sorted(name for name, made_of in sources.items() if not made_of)
    used = {one for made_of in sources.values() for one in made_of}
    left = sorted(name for name in given if name not in used and not (tied and name == _HEAD))
    if unknown or left:
        raise ConfigError(
            f"sglang: what SGLang holds cannot be told from the model folder: parameters {unknown[:5]} are made of no "
            f"tensors known here, tensors {left[:5]} are in no parameter; updates could not be proven. Use rollout=vllm"
        )
    return sources


def _source(name: str, given: Collection[str]) -> tuple[str, ...]:
    if name in given:
        return (name,)
    for fused, parts in _FUSED.items():
        made_of = tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
        if made_of[0] != name and all(one in given for one in made_of):
            return made_of
    for stacked, parts in _STACKED:
        if name.endswith(f".experts.{stacked}"):
            made_of = _of_experts(name.removesuffix(stacked), parts, given)
            if made_of:
                return made_of
    return ()


def _of_experts(prefix: str, parts: Sequence[str], given: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of all experts below `prefix`, of each those called `parts`."""
    found: list[str] = []
    for expert in itertools.count():
        each = [f"{prefix}{expert}.{part}.weight" for part in parts]
        if not all(one in given for one in each):
            return tuple(found)
        found += each
    raise AssertionError("numbers do not end")


def checksums(
    sources: Mapping[str, tuple[str, ...]], tensor: Callable[[str], torch.Tensor]
) -> dict[str, str]:
    """Return what the checker must say of parameters made of `sources`, whose tensors are `tensor(name)`."""
    return {name: _checksum(name, [tensor(one) for one in made_of]) for name, made_of in sources.items()}


def _checksum(name: str, tensors: list[torch.Tensor]) -> str:
    import torch

    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if name.endswith(_PADDED):
        (only,) = tensors
        hasher.update(bytes(-len(only) % _ROWS * only[0].nbytes))
    return hasher.digest()[:8].hex()


def differing(expected: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    """Return the parameters that are not what they should be, or not there at all, sorted."""
    return sorted(name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name))
