"""Receiving buckets into one buffer, digesting bucket k while bucket k+1 arrives."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from offbeat_ckptsync.digest import digest
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.plan import bucket_starts

if TYPE_CHECKING:
    from offbeat_ckptsync.interface import BucketReceiver, Transport
    from offbeat_ckptsync.types import Bucket, Seat, SyncOffer


def allocate(buckets: tuple[Bucket, ...], spare: torch.Tensor | None, *, device: str) -> torch.Tensor:
    """Return a uint8 buffer for all buckets end to end; `spare` where it has the size and the device."""
    _, num_bytes = bucket_starts(buckets)
    if spare is not None and spare.numel() == num_bytes and spare.device.type == device:
        return spare
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def stage(
    transport: Transport, offer: SyncOffer, seat: Seat, buckets: tuple[Bucket, ...], into: torch.Tensor
) -> tuple[tuple[str, ...], float]:
    """Receive all buckets into `into`; return their digests and the seconds spent on digests.

    Raises:
        TransferError: a bucket did not arrive; names seat, bucket and cause.
    """
    starts, _ = bucket_starts(buckets)
    timer = _Timer()
    receiver = transport.receiver(offer, seat)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix=f"digest {seat.member}") as pool:
            digests = [
                pool.submit(
                    timer.digest, _receive(receiver, seat, bucket, into[start : start + bucket.num_bytes])
                )
                for bucket, start in zip(buckets, starts, strict=True)
            ]
            return tuple(future.result() for future in digests), timer.seconds
    finally:
        receiver.close()


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
