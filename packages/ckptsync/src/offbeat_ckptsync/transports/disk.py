"""Through a shared folder: one safetensors file per version, which any tool can read (docs/sync-protocol.md, section 7).

A folder appears by one rename when it is complete; the same source's sync before it is removed when the next one appears. What another
source wrote is its own: one that died leaves its last version there.

Safetensors files: the weights of a model folder by their headers, and the head of a file to be written.

The format is that of github.com/huggingface/safetensors ("Format").
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from offbeat_ckptsync.ends.buckets import gaps
from offbeat_ckptsync.ends.manifest import dtype_of, num_bytes_of
from offbeat_ckptsync.errors import ManifestError, SyncError, TransferError
from offbeat_ckptsync.seams import BucketReceiver, BucketSender, Transport
from offbeat_ckptsync.values import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    import torch

    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_ckptsync.values import Bucket, RankId, SyncOffer


# The format's own names.
_TO_FORMAT = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
_FROM_FORMAT = {name: dtype for dtype, name in _TO_FORMAT.items()}


def write_header(specs: Iterable[TensorSpec]) -> tuple[bytes, list[int]]:
    """Return the head of a file that holds `specs`, and where the bytes of each start in that file.

    Tensors lie by falling element size, so that each is aligned to its own elements.

    Raises:
        ManifestError: the format has no such dtype.
    """
    ordered = list(specs)
    table: dict[str, object] = {}
    offsets = [0] * len(ordered)
    end = 0
    for index in sorted(range(len(ordered)), key=lambda i: (-dtype_of(ordered[i].dtype).itemsize, i)):
        spec = ordered[index]
        if spec.dtype not in _TO_FORMAT:
            raise ManifestError(
                f"safetensors has no dtype {spec.dtype} ({spec.name!r}); use another transport"
            )
        offsets[index] = end
        end += num_bytes_of(spec)
        table[spec.name] = {
            "dtype": _TO_FORMAT[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offsets[index], end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + offset for offset in offsets]


def folder_specs(folder: Path) -> tuple[TensorSpec, ...]:
    """Return the specs of a model's weights in `folder`, by name; none where it has none as safetensors.

    What `model.safetensors` holds are those, else what the folder's index lists, as `from_pretrained` takes them: other files
    beside them (a second set of weights, adapters) are not the model's. Left out is what a folder lists and no trainer exports: rotary
    frequencies, which every model computes, and layers that predict further tokens.

    Raises:
        ManifestError: the index or a file of it is damaged.
    """
    try:
        aside = _left_out(folder)
        specs = [spec for file, names in _files(folder).items() for spec in _file_specs(folder / file, names)]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ManifestError(
            f"{folder}: the safetensors files or their index cannot be read: {error!r}"
        ) from error
    return tuple(
        spec
        for spec in sorted(specs, key=lambda spec: spec.name)
        if not (spec.name.startswith(aside) or spec.name.endswith("rotary_emb.inv_freq"))
    )


def folder_tensor(folder: Path, name: str) -> torch.Tensor:
    """Return one of `folder_specs(folder)`, read from its file."""
    file = next(file for file, names in _files(folder).items() if names is None or name in names)
    with cast("Any", safe_open)(folder / file, framework="pt") as opened:
        return opened.get_tensor(name)


def _left_out(folder: Path) -> tuple[str, ...]:
    """Return how the names of layers begin that only predict further tokens."""
    about = folder / "config.json"
    config: dict[str, Any] = json.loads(about.read_text()) if about.is_file() else {}
    config = config.get("text_config", config)
    first = config.get("num_hidden_layers", 0)
    further = range(first, first + (config.get("num_nextn_predict_layers") or 0))
    return ("mtp.", *(f"model.layers.{layer}." for layer in further))


def _files(folder: Path) -> dict[str, list[str] | None]:
    """Return the files of the model with the names to take from each; None is all."""
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": None}
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {}
    files: dict[str, list[str] | None] = {}
    for name, file in cast("dict[str, str]", json.loads(index.read_text())["weight_map"]).items():
        files[file] = [*(files.get(file) or ()), name]
    return files


def _file_specs(path: Path, names: list[str] | None) -> list[TensorSpec]:
    # The library's stub knows neither names nor slices.
    with cast("Any", safe_open)(path, framework="np") as file:
        return [_spec(name, file.get_slice(name)) for name in (file.keys() if names is None else names)]


def _spec(name: str, part: Any) -> TensorSpec:  # noqa: ANN401 -- a slice of the library's
    dtype = str(part.get_dtype())
    return TensorSpec(name=name, shape=tuple(part.get_shape()), dtype=_FROM_FORMAT.get(dtype, dtype))


_POLL_S = 0.005


class DiskTransport(Transport):
    """Satisfies `Transport` through files; every member sees the same folder under the same path."""

    device = "cpu"

    def __init__(self, config: SyncConfig) -> None:
        """Keep syncs under `disk_path`, which is made where it is missing."""
        if not config.disk_path:
            raise SyncError("transport `disk` needs `disk_path`, a folder that all members share")
        self._own = (
            Path(config.disk_path) / uuid.uuid4().hex
        )  # a source's; a receiver goes where the offer says
        self._aborted: set[str] = set()

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Say where the sync will appear."""
        self._own.mkdir(parents=True, exist_ok=True)
        return {"path": str(self._own / sync_id)}

    def sender(self, offer: SyncOffer, members: list[str]) -> _Sender:
        """Start writing; a folder needs no receiver to be there."""
        return _Sender(offer, Path(str(offer.endpoint["path"])))

    def receiver(self, offer: SyncOffer, rank_id: RankId) -> _Receiver:
        """Read when the folder has appeared."""
        return _Receiver(
            offer, rank_id, Path(str(offer.endpoint["path"])), lambda: offer.sync_id in self._aborted
        )

    def abort(self, sync_id: str) -> None:
        """Stop waiting, and remove what this source wrote."""
        self._aborted.add(sync_id)
        shutil.rmtree(_partial(self._own / sync_id), ignore_errors=True)

    def close(self) -> None:
        """Nothing is held; the last version stays on disk."""


class _Sender(BucketSender):
    """A folder that appears when it is complete."""

    def __init__(self, offer: SyncOffer, path: Path) -> None:
        self._offer = offer
        self._path = path
        _partial(path).mkdir()
        header, self._starts = write_header(offer.manifest.specs)
        self._target = _partial(path) / "model.safetensors"
        self._target.write_bytes(header)

    def send(self, bucket: Bucket, payload: torch.Tensor) -> None:
        data = payload.numpy().data
        try:
            # Opened for each bucket: a sync that fails leaves no open file behind.
            with self._target.open("r+b") as file:
                for piece in bucket.pieces:
                    file.seek(self._starts[piece.spec_index] + piece.tensor_offset)
                    file.write(data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes])
        except OSError as error:
            raise TransferError(
                f"disk: bucket {bucket.index} could not be written to {self._path}: {error}"
            ) from error

    def close(self) -> None:
        about = {
            "version": self._offer.version,
            "manifest_digest": self._offer.manifest.digest,
            "bucket_bytes": self._offer.bucket_bytes,
        }
        try:
            (_partial(self._path) / "sync.json").write_text(json.dumps(about))
            _partial(self._path).rename(self._path)
        except OSError as error:
            raise TransferError(f"disk: {self._path} could not be completed: {error}") from error
        for old in self._path.parent.iterdir():
            if old != self._path and (old / "sync.json").is_file():
                shutil.rmtree(old, ignore_errors=True)  # a reader that is still at it keeps its open file


class _Receiver(BucketReceiver):
    def __init__(self, offer: SyncOffer, rank_id: RankId, path: Path, stop: Callable[[], bool]) -> None:
        self._offer = offer
        self._path = path
        timeout_s = float(offer.endpoint["timeout_s"])
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if stop():
                raise TransferError(f"disk: {rank_id} waited for {path}, and the sync was aborted")
            if time.monotonic() > deadline:
                raise TransferError(
                    f"disk: {path} did not appear for {rank_id} within {timeout_s:g} s; is the folder shared, and does the source live?"
                )
            time.sleep(_POLL_S)
        about = json.loads((path / "sync.json").read_text())
        if (about["version"], about["manifest_digest"]) != (offer.version, offer.manifest.digest):
            raise TransferError(f"disk: {path} holds version {about['version']}, offered was {offer.version}")
        _, self._starts = write_header(offer.manifest.specs)
        # Read, not mapped: where a mapped file is cut short or its disk fails, the kernel ends the process.
        self._file = (path / "model.safetensors").open("rb")

    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        target = into.numpy()
        for start, end in gaps(bucket):
            target[start:end] = 0
        for piece in bucket.pieces:
            place = target[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
            self._read(bucket, self._starts[piece.spec_index] + piece.tensor_offset, place)

    def _read(self, bucket: Bucket, start: int, into: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self._file.seek(start)
        if self._file.readinto(into.data) != len(into):
            raise TransferError(f"disk: {self._path} is cut short in bucket {bucket.index}")

    def close(self) -> None:
        self._file.close()


def _partial(path: Path) -> Path:
    return path.with_name(f".partial-{path.name}")
