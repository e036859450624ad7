"""Receiving buckets into one buffer, digesting bucket k while bucket k+1 arrives."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.digest import digest
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.plan import bucket_starts

if TYPE_CHECKING:
    from offbeat_ckptsync.interface import BucketReceiver, Transport
    from offbeat_ckptsync.types import Bucket, Seat, SyncOffer


@dataclass(slots=True)
class Staged:
    """What one rank received: its bytes, their digests, and the transport's end that may own the memory."""

    memory: torch.Tensor  # uint8, buckets end to end
    digests: tuple[str, ...]
    digest_s: float  # seconds of digesting, in a thread beside the receiving one
    lent: bool  # the memory is the transport's: not to be kept from sync to sync
    end: BucketReceiver

    def close(self) -> torch.Tensor | None:
        """Let go of everything; return the memory if the next sync may receive into it."""
        self.end.close()
        spare = None if self.lent else self.memory
        self.memory = self.memory.new_empty(0)
        return spare


def stage(
    transport: Transport,
    offer: SyncOffer,
    seat: Seat,
    buckets: tuple[Bucket, ...],
    spare: torch.Tensor | None = None,
) -> Staged:
    """Receive all buckets, into the transport's own memory where it lends some, else into `spare` or a fresh buffer.

    Bucket k is digested where it lies while bucket k + 1 arrives.

    Raises:
        TransferError: a bucket did not arrive; names seat, bucket and cause.
    """
    starts, num_bytes = bucket_starts(buckets)
    timer = _Timer()
    end = transport.receiver(offer, seat)
    try:
        lent = end.lend(num_bytes)
        memory = _allocate(num_bytes, spare, device=transport.device) if lent is None else lent
        with ThreadPoolExecutor(1, thread_name_prefix=f"digest {seat.member}") as pool:
            waiting = [
                pool.submit(
                    timer.digest, _receive(end, seat, bucket, memory[start : start + bucket.num_bytes])
                )
                for bucket, start in zip(buckets, starts, strict=True)
            ]
            digests = tuple(future.result() for future in waiting)
    except BaseException:
        end.close()
        raise
    return Staged(memory=memory, digests=digests, digest_s=timer.seconds, lent=lent is not None, end=end)


def _allocate(num_bytes: int, spare: torch.Tensor | None, *, device: str) -> torch.Tensor:
    if spare is not None and spare.numel() == num_bytes and spare.device.type == device:
        return spare
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _receive(receiver: BucketReceiver, seat: Seat, bucket: Bucket, into: torch.Tensor) -> torch.Tensor:
    try:
        receiver.receive(bucket, into)
    except SyncError:
        raise
    except Exception as error:
        raise TransferError(f"rank {seat.rank} of {seat.member}: bucket {bucket.index}: {error!r}") from error
    return into


class _Timer:
    def __init__(self) -> None:
        self.seconds = 0.0

    def digest(self, payload: torch.Tensor) -> str:
        mark = time.perf_counter()
        result = digest(payload)
        self.seconds += time.perf_counter() - mark
        return result
