"""The buffers that buckets are filled in, filling one, and the clock of those who do."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from offbeat_ckptsync.digest import digest
from offbeat_ckptsync.plan import gaps

if TYPE_CHECKING:
    from offbeat_ckptsync.types import Bucket, Piece


class Buffers:
    """Memory of one device that buckets are filled in.

    In host memory it is kept from sync to sync: fresh pages take longer than filling them does. A GPU's is not: torch
    keeps it, and gives it to others between syncs.
    """

    def __init__(self, device: str = "cpu") -> None:
        """Hold nothing yet; `device` is a torch device type."""
        self.device = device
        self._kept: list[torch.Tensor] = []

    def take(self, number: int, num_bytes: int) -> list[torch.Tensor]:
        """Return `number` buffers, uint8 [num_bytes]; those of another size are let go."""
        kept = [each for each in self._kept if each.numel() == num_bytes][:number]
        self._kept = []
        fresh = (
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(number - len(kept))
        )
        return [*kept, *fresh]

    def put_back(self, buffers: list[torch.Tensor]) -> None:
        """Take buffers back that nothing reads or writes any more."""
        if self.device == "cpu":
            self._kept = buffers


class Filling:
    """One bucket being filled: its pieces in any order, then its digest.

    The digest is taken of the whole bucket at once, in the thread that filled it last where threads fill it: the caches
    still hold most of it. Digested piece by piece on the way, from a still nearer cache, it took longer: threads then
    wait for the interpreter many thousand times in a sync.
    """

    def __init__(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Fill `buffer`, uint8 of at least the bucket's size; padding becomes zero, as both sides digest it too."""
        self.buffer = buffer
        self.payload = buffer[: bucket.num_bytes]
        self.digest_s = 0.0
        self.delta: torch.Tensor | None = None  # what is sent in place of `payload`, where there is one
        for start, end in gaps(bucket):
            self.payload[start:end].zero_()

    def add(self, piece: Piece, data: torch.Tensor) -> None:
        """Copy the bytes of `piece` out of `data`, the uint8 bytes of its tensor."""
        into = self.payload[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
        given = data[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
        if into.device.type == given.device.type == "cpu":
            np.copyto(into.numpy(), given.numpy())  # torch's own threads would meet after every tensor
        else:
            into.copy_(given)

    def digest(self) -> str:
        """Return the digest of the bucket, once it is full."""
        mark = time.perf_counter()
        result = digest(self.payload)
        self.digest_s = time.perf_counter() - mark
        return result


class BusyClock:
    """How long at least one thread was at work."""

    def __init__(self) -> None:
        """Start at zero."""
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._busy = 0
        self._since = 0.0

    def __enter__(self) -> None:
        """One more is at work."""
        with self._lock:
            if self._busy == 0:
                self._since = time.perf_counter()
            self._busy += 1

    def __exit__(self, *_: object) -> None:
        """One less is."""
        with self._lock:
            self._busy -= 1
            if self._busy == 0:
                self.seconds += time.perf_counter() - self._since
