"""The digest of bytes on a GPU, taken where they lie.

`sum64` is a hash that every word contributes to on its own, so that a device computes it in parallel and in any order.
With all arithmetic modulo 2**64, w[0..m-1] the payload's bytes as little-endian 64-bit words (the last filled up with
zeros), n the number of bytes:

    z[i] = w[i] + (i + 1) * 0x9E3779B97F4A7C15
    z[i] = (z[i] ^ (z[i] >> 32)) * 0xD6E8FEB86659FD93
    z[i] = (z[i] ^ (z[i] >> 29)) * 0xA0761D6478BD642F
    z[i] =  z[i] ^ (z[i] >> 32)
    digest = "sum64-" and 16 hex digits of  z[0] + .. + z[m-1] + n * 0x9E3779B97F4A7C15

Each step maps words one to one, so any change of a single word changes the sum; other changes go unseen with a
probability of about 2**-64. It guards against defects and broken hardware, not against forgers: nor does xxh3.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def sum64_on_device(payload: torch.Tensor) -> str:
    """Return the `sum64` digest of a contiguous uint8 tensor on a GPU, by the kernel where there is Triton."""
    return sum64(payload) if _add_words() is None else sum64_by_kernel(payload)


def sum64(payload: torch.Tensor) -> str:
    """Return the `sum64` digest of a contiguous uint8 tensor, computed where it lies; waits for the result."""
    num_bytes = payload.numel()
    total = torch.zeros((), dtype=torch.int64, device=payload.device)
    for start in range(0, num_bytes, _SPAN_BYTES):
        words = _words(payload[start : start + _SPAN_BYTES])
        first = start // 8 + 1
        z = torch.arange(first, first + words.numel(), dtype=torch.int64, device=payload.device)
        z.mul_(_signed(_K1)).add_(words)
        z.bitwise_xor_(_shifted(z, 32)).mul_(_signed(_K2))
        z.bitwise_xor_(_shifted(z, 29)).mul_(_signed(_K3))
        z.bitwise_xor_(_shifted(z, 32))
        total += z.sum()
    return _told(total, num_bytes)


def sum64_by_kernel(payload: torch.Tensor) -> str:
    """Return what `sum64` does, in one pass over the bytes; for who has Triton and a GPU (or Triton's interpreter)."""
    add_words = _add_words()
    assert add_words is not None
    num_bytes = payload.numel()
    whole = num_bytes // 8 * 8
    payload = payload.clone() if payload.storage_offset() % 8 else payload
    with torch.cuda.device_of(payload):  # Triton launches on the thread's current GPU
        total = torch.zeros((), dtype=torch.int64, device=payload.device)
        add_words(payload[:whole].view(torch.int64), total, 0)
        if whole < num_bytes:
            add_words(_words(payload[whole:].clone()), total, whole // 8)
        return _told(total, num_bytes)


@cache
def _add_words() -> Callable[[torch.Tensor, torch.Tensor, int], None] | None:
    try:
        from offbeat_ckptsync.plan.sum64_kernel import add_words
    except ImportError:  # a torch without Triton
        return None
    return add_words


def _told(total: torch.Tensor, num_bytes: int) -> str:
    return f"sum64-{(int(total.item()) + num_bytes * _K1) % (1 << 64):016x}"


_K1, _K2, _K3 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
_SPAN_BYTES = 16 << 20  # worked on at a time: bounds the scratch memory to some 50 MiB


def _words(payload: torch.Tensor) -> torch.Tensor:
    if payload.numel() % 8 or payload.storage_offset() % 8:
        padded = payload.new_zeros((payload.numel() + 7) // 8 * 8)
        padded[: payload.numel()] = payload
        payload = padded
    return payload.view(torch.int64)


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Return z >> by as of unsigned words: torch's own shift repeats the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
