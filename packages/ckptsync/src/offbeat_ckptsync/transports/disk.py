"""Through a shared folder: one safetensors file per version, which any tool can read (docs/sync-protocol.md, section 7).

A folder appears by one rename when it is complete; the same source's sync before it is removed when the next one appears. What another
source wrote is its own: one that died leaves its last version there.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.plan.buckets import gaps
from offbeat_ckptsync.seams import BucketReceiver, BucketSender, Transport
from offbeat_ckptsync.transports.weight_files import write_header

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch

    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.values import Bucket, RankId, SyncOffer

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
