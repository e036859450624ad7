"""Folders of verified weights: written, read back by the format's own reader, compared."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash

from offbeat_ckptsync.errors import DigestError, TransferError
from offbeat_ckptsync.manifest import manifest_of
from offbeat_ckptsync.safetensors_header import write_header

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def write_verified(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write `tensors` into a new `folder` as one safetensors file; it appears only once its bytes were read back right.

    Raises:
        DigestError: what is in the file is not what was to be written; names the tensor. Nothing has appeared.
        TransferError: it cannot be written.
    """
    whole = dict(tensors)
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write(partial / _FILE, whole)
        _compare(partial / _FILE, whole)
        partial.rename(folder)
    except OSError as error:
        raise TransferError(f"{folder} could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def keep_only(folder: Path, parent: Path) -> None:
    """Remove every other folder of weights in `parent`."""
    for other in parent.iterdir():
        if other != folder and (other / _FILE).is_file():
            shutil.rmtree(other, ignore_errors=True)


_FILE = "model.safetensors"


def _write(path: Path, whole: dict[str, torch.Tensor]) -> None:
    head, starts = write_header(manifest_of(whole.items()).specs)
    with path.open("wb") as file:
        file.write(head)
        for start, tensor in zip(starts, whole.values(), strict=True):
            file.seek(start)
            file.write(_bytes_of(tensor))


def _compare(path: Path, whole: dict[str, torch.Tensor]) -> None:
    from safetensors import torch as reader

    # The library's stub leaves the kind of path open.
    found = cast("dict[str, torch.Tensor]", cast("Any", reader).load_file(path))
    for name, tensor in whole.items():
        there = found.get(name)
        if there is None or (there.shape, there.dtype, _digest(there)) != (
            tensor.shape,
            tensor.dtype,
            _digest(tensor),
        ):
            raise DigestError(f"{path}: {name!r} is not what was written; look at the disk, and sync again")


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(_bytes_of(tensor))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
