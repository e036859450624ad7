"""The buffers that buckets are filled in, and filling one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from offbeat_ckptsync.ends.buckets import gaps
from offbeat_ckptsync.ends.digest import digest
from offbeat_ckptsync.toolkit.threads import HostPages, cuda_runtime, mark_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_ckptsync.values import Bucket, Piece


_BLOCK_BYTES = 512 << 10  # copied and digested at a time: a cache holds it, so memory is read once


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
        return [*kept, *(self._make(num_bytes) for _ in range(number - len(kept)))]

    def put_back(self, buffers: list[torch.Tensor]) -> None:
        """Take buffers back that nothing reads or writes any more."""
        if self.device == "cpu":
            self._kept = buffers

    def _make(self, num_bytes: int) -> torch.Tensor:
        if self.device != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return torch.frombuffer(HostPages.private(num_bytes), dtype=torch.uint8)[:num_bytes]


class BucketBuilder:
    """One bucket being filled: its pieces, then its digest.

    With `digests_pieces` each block of a tensor in host memory is digested right after it was copied, while a cache holds it: a
    GiB is then read from memory once less, and memory is what bounds filling. It is digested where it came from: a long copy
    may leave nothing of where it went in a cache, and what copying spoils gets no digest that fits. Else the digest is taken of
    the whole bucket, by whichever thread asks for it, so that the one that fills it can go on.
    """

    def __init__(self, bucket: Bucket, buffer: torch.Tensor, *, digests_pieces: bool = False) -> None:
        """Fill `buffer`, uint8 of at least the bucket's size; padding becomes zero, as both sides digest it too."""
        self.buffer = buffer
        self.payload = buffer[: bucket.num_bytes]
        self.digest_s = 0.0
        self.waiting: list[tuple[Piece, torch.Tensor]] = []  # to be added by the thread that completes it
        self._bytes = self.payload.numpy() if buffer.device.type == "cpu" else None
        self._running = xxhash.xxh3_128() if digests_pieces else None
        self._num_digested = 0
        self._is_pinned = self._bytes is not None and cuda_runtime() is not None and buffer.is_pinned()
        self._copied: torch.cuda.Event | None = None  # behind the last copy that a GPU makes by itself
        for start, end in gaps(bucket):
            self.payload[start:end].zero_()

    def add(self, piece: Piece, data: torch.Tensor) -> None:
        """Copy the bytes of `piece` out of `data`, the uint8 bytes of its tensor; pieces come in the bucket's order."""
        start, end = piece.bucket_offset, piece.bucket_offset + piece.num_bytes
        given = data[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
        if self._bytes is None or given.device.type != "cpu":
            # Into pinned memory a GPU copies beside what the source does next, in the order of the source's stream.
            self.payload[start:end].copy_(given, non_blocking=self._is_pinned)
            if self._is_pinned:
                self._copied = mark_of(given)
            return
        # Not torch's copy: its threads would meet after every tensor. Not `numpy()`: it forbids torch for ever to resize
        # the storage, which an engine does that moves its weights.
        source = np.from_dlpack(given)
        if self._running is None:
            np.copyto(self._bytes[start:end], source)
            return
        self._digest_until(start)
        self._num_digested = end
        for first, last in _blocks(len(source)):
            block = source[first:last]
            np.copyto(self._bytes[start + first : start + last], block)
            mark = time.perf_counter()
            self._running.update(block.data)
            self.digest_s += time.perf_counter() - mark

    def settle(self) -> None:
        """Wait for what a GPU copies by itself."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()

    def digest(self) -> str:
        """Return the digest of the bucket, once it is full."""
        self.settle()
        if self._running is not None:
            self._digest_until(self.payload.numel())
            return self._running.hexdigest()
        mark = time.perf_counter()
        result = digest(self.payload)
        self.digest_s = time.perf_counter() - mark
        return result

    def _digest_until(self, end: int) -> None:
        if self._running is None or self._bytes is None:
            return
        self.settle()
        mark = time.perf_counter()
        self._running.update(self._bytes[self._num_digested : end].data)
        self._num_digested = end
        self.digest_s += time.perf_counter() - mark


def _blocks(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of blocks; the last one is longer, not shorter: the C library writes long ones past the caches."""
    first = 0
    while first < num_bytes:
        last = num_bytes if num_bytes - first < 2 * _BLOCK_BYTES else first + _BLOCK_BYTES
        yield first, last
        first = last
