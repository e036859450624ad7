"""Digests of bytes, fast enough to check everything that is sent: xxh3-128 on the host, `sum64` on a GPU.

They guard against defects and broken hardware, not against forgers. A label binds a version to the digests of its content.

The digest of bytes on a GPU, taken where they lie.

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

import json
from functools import cache
from typing import TYPE_CHECKING

import torch
import xxhash

from offbeat_ckptsync.ends.buckets import tensors_in
from offbeat_ckptsync.errors import DigestError, VersionError
from offbeat_ckptsync.values import Bucket, Echo, Label, Manifest, Sent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
        from offbeat_ckptsync.ends.sum64_kernel import add_words
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


def digest(payload: torch.Tensor) -> str:
    """Return the digest of a contiguous uint8 tensor: xxh3-128 in hex, or `sum64` where it is on a GPU."""
    if payload.device.type != "cpu":
        return sum64_on_device(payload)
    return xxhash.xxh3_128_hexdigest(payload.numpy().data)


def check_echo(echo: Echo, sent: Sent, manifest: Manifest, buckets: tuple[Bucket, ...]) -> None:
    """Make sure that what one rank staged is what was sent.

    Raises:
        VersionError: it staged another version or other tensors.
        DigestError: the bytes of a bucket differ; names the first such bucket and the tensors in it.
    """
    who = f"rank {echo.rank} of {echo.member}"
    if (echo.version, echo.manifest_digest) != (sent.version, sent.manifest_digest):
        raise VersionError(
            f"{who} staged version {echo.version} with manifest {echo.manifest_digest}, but version {sent.version} "
            f"with manifest {sent.manifest_digest} was sent; sync again"
        )
    num_sent = len(sent.bucket_digests)
    if not len(echo.bucket_digests) == len(buckets) == num_sent:
        raise DigestError(
            f"{who} staged {len(echo.bucket_digests)} buckets of {num_sent}, was to get {len(buckets)}"
        )
    for bucket, got, want in zip(buckets, echo.bucket_digests, sent.bucket_digests, strict=True):
        if got != want:
            raise DigestError(
                f"{who}: bucket {bucket.index} of {num_sent} arrived with digest {got}, sent with {want}; it "
                f"holds {tensors_in(manifest, bucket)}"
            )


def require_every_rank(member: str, echoes: Sequence[Echo]) -> None:
    """Make sure that every rank of `member` sent one echo, and nobody else did.

    Raises:
        DigestError: an echo is missing, came twice, or is another member's: not all that was staged is proven.
    """
    ranks = sorted(echo.rank for echo in echoes)
    strangers = sorted({echo.member for echo in echoes} - {member})
    counts = {echo.num_ranks for echo in echoes} or {1}
    if strangers or len(counts) > 1 or ranks != list(range(*counts)):
        of = f", of {', '.join(strangers)} among others" if strangers else ""
        raise DigestError(
            f"{member} has {' or '.join(map(str, sorted(counts)))} ranks and sent echoes of ranks {ranks}{of}; expected "
            "one of each rank of its own"
        )


def label_of(sent: Sent, bucket_bytes: int) -> Label:
    """Return the label of what was sent; every rank that staged it computes the same one."""
    row = [sent.manifest_digest, bucket_bytes, list(sent.bucket_digests)]
    content = xxhash.xxh3_128_hexdigest(json.dumps(row, separators=(",", ":")).encode())
    return Label(version=sent.version, manifest_digest=sent.manifest_digest, content_digest=content)


def told(label: Label | None, version: int) -> str:
    """Return a label in words, for messages."""
    return f"version {version} with content {label.content_digest if label else 'nobody vouched for'}"
