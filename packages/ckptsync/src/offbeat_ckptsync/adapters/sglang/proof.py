"""What SGLang holds, against what it was given: the checksums of its `/weights_checker`, computed here from the tensors sent.

SGLang answers an update with success whatever names were in it. Its checker hashes each parameter where it lies: SHA-256 of the
bytes, the first eight of them (`weight_checker.py`, 0.5.23, on CPU; on GPUs another hash, which is not known here). A parameter is
a tensor of the checkpoint, several of them one after the other (`_FUSED`), or one with rows of zeros up to a multiple of
64 (embeddings). Whether that holds of a server is seen before the first sync: it must hold what is in its model folder.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.plan.buckets import bytes_of
from offbeat_ckptsync.transports.weight_files import weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    import torch

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_ROWS = 64
_HEAD = "lm_head.weight"  # left out by a server that ties it to the embedding


class Proof:
    """The tensors that each parameter of one server is made of."""

    def __init__(self, held: Collection[str], given: Collection[str]) -> None:
        """Find them among `given`.

        Raises:
            TransferError: there is a parameter, or a tensor, that belongs to nothing.
        """
        self._sources = {name: _source(name, given) for name in held}
        used = {one for made_of in self._sources.values() for one in made_of}
        unknown = [name for name, made_of in self._sources.items() if not made_of]
        left = [name for name in given if name not in used and name != _HEAD]
        if unknown or left:
            raise TransferError(
                f"{_NOT_PROVABLE}: parameters {unknown[:5]} and tensors {left[:5]} belong to nothing"
            )

    @classmethod
    def of_folder(cls, folder: Path, held: Mapping[str, str]) -> Proof:
        """Return the proof for a server that says it loaded `folder` and holds `held`.

        Raises:
            TransferError: the folder cannot be read here, or does not explain what the server holds.
        """
        places = weight_files(folder) if folder.is_dir() else {}
        if not places:
            raise TransferError(f"{_NOT_PROVABLE}: {str(folder)!r}, its model folder, cannot be read here")
        proof = cls(held, places)
        found = proof._checksums(lambda name: _read(places[name], name))
        wrong = sorted(name for name in held if found[name] != held[name])
        if wrong:
            raise TransferError(f"{_NOT_PROVABLE}: it does not hold what is in {str(folder)!r}: {wrong[:5]}")
        return proof

    def expected(self, whole: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return what the server must say once it holds `whole`."""
        return self._checksums(whole.__getitem__)

    def _checksums(self, tensor: Callable[[str], torch.Tensor]) -> dict[str, str]:
        return {
            name: _checksum(name, [tensor(one) for one in made_of]) for name, made_of in self._sources.items()
        }


def _source(name: str, given: Collection[str]) -> tuple[str, ...]:
    if name in given:
        return (name,)
    for fused, parts in _FUSED.items():
        made_of = tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
        if made_of[0] != name and all(one in given for one in made_of):
            return made_of
    return ()


def _checksum(name: str, tensors: list[torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(bytes_of(tensor.detach().cpu()).numpy().data)
    if name.endswith(_PADDED):
        (only,) = tensors
        hasher.update(bytes(-len(only) % _ROWS * only[0].nbytes))
    return hasher.digest()[:8].hex()


def _read(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with cast("Any", safe_open)(path, framework="pt") as file:
        return file.get_tensor(name)


_NOT_PROVABLE = "what the server holds cannot be proven; `Loading(prove=False)` goes on without: then the version it says is all there is"
