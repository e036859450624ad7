"""Pieces of tensors in safetensors files: each rank writes its own, and any layout of ranks reads the regions it needs."""

from __future__ import annotations

import ctypes
import json
import os
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from offbeat_engine.errors import CheckpointError
from offbeat_engine.toolkit.state.slices import Described, Index, Region

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from offbeat_engine.toolkit.state.checkpoint_folders import Entry
    from offbeat_engine.values import WeightShard

MAX_FILE_BYTES = 512 << 20
# Pages of a file that were read count as this process's memory until the file is closed.
_MAX_MAPPED_BYTES = 64 << 20


def write_slices(folder: Path, rank: int, pieces: Iterable[WeightShard]) -> tuple[Index, dict[str, Entry]]:
    """Write this rank's `pieces` to files of its own in `folder`; return what it has written, and the entry of each file.

    A piece without numbers says that there is a tensor of that name and shape. What is on another device is copied to host
    memory a file at a time, at most `MAX_FILE_BYTES` or a single larger piece.
    """
    index: Index = {}
    entries: dict[str, Entry] = {}
    held: dict[str, torch.Tensor] = {}
    number = num_bytes = 0
    for piece in pieces:
        shape, region = tuple(piece.shape), Region(tuple(piece.offsets), tuple(piece.tensor.shape))
        if held and num_bytes + piece.tensor.nbytes > MAX_FILE_BYTES:
            entries[_file(rank, number)] = _write(folder / _file(rank, number), held)
            held, num_bytes, number = {}, 0, number + 1
        earlier = index.get(piece.name)
        there = () if earlier is None else earlier.pieces
        new = ((region, _file(rank, number)),) if region.numel else ()
        index[piece.name] = Described(shape=shape, dtype=piece.tensor.dtype, pieces=(*there, *new))
        if new:
            held[_key(piece.name, region)] = piece.tensor.detach().contiguous().cpu()
            num_bytes += piece.tensor.nbytes
    if held:
        entries[_file(rank, number)] = _write(folder / _file(rank, number), held)
    return index, entries


def _file(rank: int, number: int) -> str:
    return f"rank_{rank}_{number}.safetensors"


def _key(name: str, region: Region) -> str:
    return f"{name}@{','.join(map(str, region.offsets))}"


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> Entry:
    """Write a file; its digest is of the header that was written and of the tensors as they are in memory."""
    from safetensors.torch import save_file

    save_file(tensors, path)
    digest = xxhash.xxh3_128()
    with path.open("rb") as written:
        os.fsync(written.fileno())  # here: another host's flush does not reach what this one holds back
        length = written.read(8)
        header = written.read(int.from_bytes(length, "little"))
        size = os.fstat(written.fileno()).st_size
    digest.update(length + header)
    places = json.loads(header)
    for name in sorted(tensors, key=lambda name: places[name]["data_offsets"]):
        # Not by `numpy`, after which torch resizes a tensor's memory no more: it may wait in host memory later.
        digest.update((ctypes.c_char * tensors[name].nbytes).from_address(tensors[name].data_ptr()))
    return size, digest.hexdigest()


class SliceReader:
    """Reads regions of the tensors that `index` lists, from the files in `folder`."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.index = index
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._num_mapped = 0

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """Return `region` of the tensor `name` (None: all of it) on the CPU, in memory of its own."""
        described = self.index[name]
        region = Region.whole(described.shape) if region is None else region
        out = torch.empty(region.shape, dtype=described.dtype)
        self.fill(name, region, out)
        return out

    def fill(self, name: str, region: Region, out: torch.Tensor) -> None:
        """Write `region` of the tensor `name` into `out`, which has its shape and dtype, wherever that is.

        Raises:
            CheckpointError: a file is cut off, or does not hold what the index says; or the index lacks a part of the region.
        """
        described, filled = self.index[name], 0
        for piece, file in described.pieces:
            common = piece.common(region)
            if common is None:
                continue
            values = self._values(file, name, piece, described.dtype, common)
            with torch.no_grad():
                out[common.within(region)].copy_(values)
            filled += common.numel
            self._count(file, values.nbytes)
        if filled != region.numel:
            raise CheckpointError(
                f"{self._folder} holds {filled} of the {region.numel} values that are needed of `{name}`; use another checkpoint"
            )

    def close(self) -> None:
        """Let go of the files; what was read stays."""
        self._open.clear()
        self._num_mapped = 0

    def _count(self, file: str, num_bytes: int) -> None:
        self._num_mapped += num_bytes
        if self._num_mapped > _MAX_MAPPED_BYTES:
            self.close()

    def _values(
        self, file: str, name: str, piece: Region, dtype: torch.dtype, common: Region
    ) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        key, path = _key(name, piece), self._folder / file
        try:
            opened = self._open.get(file)
            if opened is None:
                opened = self._open[file] = safe_open(path, framework="pt")
            found = opened.get_slice(key)
            shape = tuple(found.get_shape())
            # No slices of what has no dimensions.
            values = found[common.within(piece)] if shape and shape == piece.shape else opened.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} is cut off or damaged, or not what the index says ({error}); restore it from a copy"
            ) from error
        if shape != piece.shape or values.dtype != dtype:
            raise CheckpointError(
                f"{path} holds `{name}` as {values.dtype} {list(shape)}, and the index says {dtype} {list(piece.shape)}"
            )
        return values
