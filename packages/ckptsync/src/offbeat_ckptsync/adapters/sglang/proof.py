"""What SGLang holds, against what it was given: the checksums of its `/weights_checker`, computed here from the tensors sent.

SGLang answers an update with success whatever names were in it. Its checker hashes each parameter where it lies: SHA-256 of the
bytes, the first eight of them (`weight_checker.py`, 0.5.23, on CPU; on GPUs another hash, which is not known here). A parameter is
a tensor of the checkpoint, several of them one after the other (`_FUSED`, `_STACKED` by experts), or one with rows of zeros up to a multiple of
64 (embeddings). A server with parameters, or on a device, of which that is not so is refused before the first sync.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.plan.buckets import bytes_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

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
_HEAD = "lm_head.weight"  # left out by a server that ties it to the embedding


class Proof:
    """The tensors that each parameter of one server is made of."""

    def __init__(self, held: Collection[str], given: Collection[str], device: str) -> None:
        """Find what `held` parameters of a server on `device` are made of, among the names of tensors that are `given` it.

        Raises:
            TransferError: there is a parameter, or a tensor, that belongs to nothing, or hashes are not known there.
        """
        if device != "cpu":
            raise TransferError(
                f"{_NOT_PROVABLE}: on {device!r} SGLang hashes in a way that is not known here"
            )
        if not given:
            raise TransferError(
                f"{_NOT_PROVABLE}: its model folder cannot be read here, and `expected` was not given"
            )
        self._sources = {name: _source(name, given) for name in held}
        used = {one for made_of in self._sources.values() for one in made_of}
        unknown = [name for name, made_of in self._sources.items() if not made_of]
        left = [name for name in given if name not in used and name != _HEAD]
        if unknown or left:
            raise TransferError(
                f"{_NOT_PROVABLE}: parameters {unknown[:5]} and tensors {left[:5]} belong to nothing"
            )

    def expected(self, whole: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return what the server must say once it holds `whole`."""
        return {
            name: _checksum(name, [whole[one] for one in made_of]) for name, made_of in self._sources.items()
        }


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


def _checksum(name: str, tensors: list[torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(bytes_of(tensor.detach().cpu()).numpy().data)
    if name.endswith(_PADDED):
        (only,) = tensors
        hasher.update(bytes(-len(only) % _ROWS * only[0].nbytes))
    return hasher.digest()[:8].hex()


_NOT_PROVABLE = "what the server holds cannot be proven; `Loading(prove=False)` goes on without: then the version it says is all there is"
