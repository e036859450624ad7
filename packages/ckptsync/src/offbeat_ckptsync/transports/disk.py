"""Through a shared folder: one safetensors file per version that any tool can read, with its digests beside it.

`<folder>/<sync id>/model.safetensors` holds the tensors, `sync.json` version and digests. The folder appears by one
rename when both are complete; the sync before it is removed when the next one appears.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offbeat_ckptsync.digest import digest
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.plan import gaps
from offbeat_ckptsync.safetensors_header import write_header

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from offbeat_ckptsync.types import Bucket, Seat, SyncOffer

_POLL_S = 0.005


class DiskTransport:
    """Satisfies `Transport` through files; every member sees the same folder under the same path."""

    device = "cpu"

    def __init__(self, folder: str) -> None:
        """Keep syncs under `folder`, which is made where it is missing."""
        if not folder:
            raise SyncError("transport `disk` needs `disk_path`, a folder that all members share")
        self._folder = Path(folder)
        self._aborted: set[str] = set()

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Say where the sync will appear."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return {"path": str(self._folder / sync_id)}

    def lend(self, offer: SyncOffer, num_bytes: int) -> None:
        """Nothing to lend: buckets are packed into buffers."""

    def sender(self, offer: SyncOffer, members: list[str]) -> _Sender:
        """Start writing; a folder needs no receiver to be there."""
        return _Sender(offer, Path(str(offer.endpoint["path"])))

    def receiver(self, offer: SyncOffer, seat: Seat) -> _Receiver:
        """Read when the folder has appeared."""
        return _Receiver(
            offer, seat, Path(str(offer.endpoint["path"])), lambda: offer.sync_id in self._aborted
        )

    def abort(self, sync_id: str) -> None:
        """Stop waiting, and remove what was written."""
        self._aborted.add(sync_id)
        shutil.rmtree(_partial(self._folder / sync_id), ignore_errors=True)

    def close(self) -> None:
        """Nothing is held; the last version stays on disk."""


class _Sender:
    def __init__(self, offer: SyncOffer, path: Path) -> None:
        self._offer = offer
        self._path = path
        self._digests: list[str] = []
        header, self._starts = write_header(offer.manifest.specs)
        partial = _partial(path)
        partial.mkdir()
        self._target = partial / "model.safetensors"
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
        self._digests.append(digest(payload))

    def close(self) -> None:
        about = {
            "version": self._offer.version,
            "manifest_digest": self._offer.manifest.digest,
            "bucket_bytes": self._offer.bucket_bytes,
            "bucket_digests": self._digests,
        }
        try:
            (_partial(self._path) / "sync.json").write_text(json.dumps(about))
            _partial(self._path).rename(self._path)
        except OSError as error:
            raise TransferError(f"disk: {self._path} could not be completed: {error}") from error
        for old in self._path.parent.iterdir():
            if old != self._path and (old / "sync.json").is_file():
                shutil.rmtree(old, ignore_errors=True)  # a reader that is still at it keeps its open file


class _Receiver:
    def __init__(self, offer: SyncOffer, seat: Seat, path: Path, stop: Callable[[], bool]) -> None:
        self._offer = offer
        self._path = path
        deadline = time.monotonic() + float(offer.endpoint["timeout_s"])
        while not path.exists():
            if stop() or time.monotonic() > deadline:
                raise TransferError(
                    f"disk: {path} did not appear for rank {seat.rank} of {seat.member} within "
                    f"{offer.endpoint['timeout_s']} s; is the folder shared, and does the source live?"
                )
            time.sleep(_POLL_S)
        about = json.loads((path / "sync.json").read_text())
        if (about["version"], about["manifest_digest"]) != (offer.version, offer.manifest.digest):
            raise TransferError(f"disk: {path} holds version {about['version']}, offered was {offer.version}")
        _, self._starts = write_header(offer.manifest.specs)
        self._bytes = np.memmap(path / "model.safetensors", dtype=np.uint8, mode="r")

    def lend(self, num_bytes: int) -> None:
        """Nothing to lend: buckets are staged in the receiver's memory."""

    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        target = into.numpy()
        for start, end in gaps(bucket):
            target[start:end] = 0
        for piece in bucket.pieces:
            start = self._starts[piece.spec_index] + piece.tensor_offset
            found = self._bytes[start : start + piece.num_bytes]
            if len(found) != piece.num_bytes:
                raise TransferError(f"disk: {self._path} is cut short in bucket {bucket.index}")
            target[piece.bucket_offset : piece.bucket_offset + piece.num_bytes] = found

    def close(self) -> None:
        del self._bytes


def _partial(path: Path) -> Path:
    return path.with_name(f".partial-{path.name}")
