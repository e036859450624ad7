"""What a checkpoint says of its tensors: which region of each lies in which file. Plain values, no files.

A tensor has a name, a whole shape and a dtype; its pieces are regions (where they begin in each dimension, and how long they are)
that together hold every number exactly once, however the ranks that wrote them were laid out.

Pieces of tensors in safetensors files: each rank writes its own, and any layout of ranks reads the regions it needs.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from offbeat_engine.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from offbeat_engine.batch import WeightShard
    from offbeat_engine.toolkit.state.checkpoint_folders import Entry


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A box in a tensor: it begins at `offsets` and has `shape`, both as long as the tensor has dimensions."""

    offsets: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Region:
        """Return all of a tensor of `shape`."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def common(self, other: Region) -> Region | None:
        """Return what both hold, None where that is nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = map(min, self._stops(), other._stops())
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Region(starts, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Return where it lies in a tensor that holds `outer`."""
        starts = (mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def _stops(self) -> Iterator[int]:
        return (start + size for start, size in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One tensor of a checkpoint: `pieces` are its regions with the file that each lies in, in order."""

    shape: Shape
    dtype: torch.dtype
    pieces: tuple[tuple[Region, str], ...]

    def check(self, name: str) -> None:
        """Make sure that the pieces hold every number once.

        Raises:
            CheckpointError: one lies outside, two share numbers, or numbers are missing.
        """
        whole, before = Region.whole(self.shape), list[tuple[Region, str]]()
        # By where they begin, so that those of rows meet their neighbours only.
        for region, file in self.pieces:
            if len(region.shape) != len(self.shape) or (region.numel and region.common(whole) != region):
                raise CheckpointError(
                    f"`{name}` has the shape {list(self.shape)}, and {file} a piece of it at {_at(region)}, "
                    "which is outside"
                )
            before = [each for each in before if not each[0].shape or _stop(each[0]) > region.offsets[0]]
            for other, earlier in before:
                if region.common(other) is not None:
                    raise CheckpointError(
                        f"`{name}` has numbers twice: at {_at(other)} in {earlier}, and at {_at(region)} in {file}"
                    )
            before.append((region, file))
        there = sum(region.numel for region, _ in self.pieces)
        if there != whole.numel:
            raise CheckpointError(
                f"`{name}` should have {whole.numel} numbers {list(self.shape)}, and only {there} were written"
            )


Index = dict[str, Described]


def _stop(region: Region) -> int:
    return region.offsets[0] + region.shape[0]


def _at(region: Region) -> str:
    ranges = zip(region.offsets, region.shape, strict=True)
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in ranges) + "]"


def merge(parts: Iterable[Mapping[str, Any]], source: str) -> Index:
    """Return the index of what several ranks say they have written (see `said_of`), checked.

    Raises:
        CheckpointError: two speak of different tensors by one name, or the pieces do not come out whole.
    """
    index: Index = {}
    for part in parts:
        for name, described in read_index(part, source).items():
            earlier = index.get(name, described)
            if (earlier.shape, earlier.dtype) != (described.shape, described.dtype):
                raise CheckpointError(
                    f"`{name}` is {_kind(earlier)} on one rank and {_kind(described)} on another"
                )
            pieces = described.pieces if name not in index else (*earlier.pieces, *described.pieces)
            index[name] = Described(
                shape=described.shape, dtype=described.dtype, pieces=tuple(sorted(pieces))
            )
    for name, described in index.items():
        described.check(name)
    return index


def said_of(index: Mapping[str, Described]) -> dict[str, Any]:
    """Return `index` as JSON can say it; `read_index` reads it."""
    return {
        name: {
            "shape": list(described.shape),
            "dtype": str(described.dtype).removeprefix("torch."),
            "pieces": [[file, list(region.offsets), list(region.shape)] for region, file in described.pieces],
        }
        for name, described in index.items()
    }


def read_index(said: Mapping[str, Any], source: str) -> Index:
    """Return the index that JSON `said`; `source` is how messages call it.

    Raises:
        CheckpointError: it is no such thing.
    """
    try:
        return {name: _described(entry) for name, entry in said.items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{source} should say shape, dtype and pieces of each tensor ({type(error).__name__}: {error}); "
            "use another checkpoint"
        ) from error


def _described(said: Mapping[str, Any]) -> Described:
    dtype = getattr(torch, said["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{said['dtype']!r} is no dtype")
    pieces = ((_region(offsets, shape), str(file)) for file, offsets, shape in said["pieces"])
    return Described(shape=_shape(said["shape"]), dtype=dtype, pieces=tuple(sorted(pieces)))


def _region(offsets: Iterable[Any], shape: Iterable[Any]) -> Region:
    region = Region(_shape(offsets), _shape(shape))
    if len(region.offsets) != len(region.shape):
        raise ValueError(f"{region} has more offsets than sizes, or less")
    return region


def _shape(said: Iterable[Any]) -> Shape:
    sizes = tuple(said)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{list(sizes)} are no sizes")
    return sizes


def check_fit(index: Index, wanted: Mapping[str, tuple[Shape, torch.dtype]], source: str) -> None:
    """Make sure that `index` has what an engine wants, by name: whole shape and dtype.

    Raises:
        CheckpointError: something is not there, or is something else.
    """
    for name, (shape, dtype) in wanted.items():
        found = index.get(name)
        if found is None or found.shape != shape:
            raise CheckpointError(
                f"{source} does not fit the model: `{name}` should be {list(shape)}, "
                f"got {'nothing' if found is None else list(found.shape)}"
            )
        if found.dtype != dtype:
            raise CheckpointError(
                f"{source} does not fit the model: `{name}` should be {dtype}, got {found.dtype}"
            )


def _kind(described: Described) -> str:
    return f"{described.dtype} {list(described.shape)}"


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
