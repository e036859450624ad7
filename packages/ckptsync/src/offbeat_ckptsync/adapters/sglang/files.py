"""A folder of weights that was looked at after it was written."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, cast

from offbeat_ckptsync.errors import DigestError, TransferError
from offbeat_ckptsync.plan.buckets import bytes_of
from offbeat_ckptsync.plan.digest import digest
from offbeat_ckptsync.plan.manifest import manifest_of
from offbeat_ckptsync.transports.weight_files import write_header

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch


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


def keep_only(folder: Path | None, parent: Path) -> None:
    """Remove the weights of every version in `parent` but those in `folder`; a model that lies there is not ours."""
    for other in parent.glob("version-*"):
        if other != folder and (other / _FILE).is_file():
            shutil.rmtree(other, ignore_errors=True)


_FILE = "model.safetensors"


def _write(path: Path, whole: dict[str, torch.Tensor]) -> None:
    head, starts = write_header(manifest_of(whole.items()).specs)
    with path.open("wb") as file:
        file.write(head)
        for start, tensor in zip(starts, whole.values(), strict=True):
            file.seek(start)
            file.write(bytes_of(tensor.cpu()).numpy().data)


def _compare(path: Path, whole: dict[str, torch.Tensor]) -> None:
    from safetensors import torch as reader

    # The library's stub leaves the kind of path open.
    found = cast("dict[str, torch.Tensor]", cast("Any", reader).load_file(path))
    for name, tensor in whole.items():
        there = found.get(name)
        if there is None or (there.shape, there.dtype, digest(bytes_of(there))) != (
            tensor.shape,
            tensor.dtype,
            digest(bytes_of(tensor.cpu())),
        ):
            raise DigestError(f"{path}: {name!r} is not what was written; look at the disk, and sync again")
