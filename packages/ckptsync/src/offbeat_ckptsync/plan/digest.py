"""Digests of bytes, fast enough to check everything that is sent: xxh3-128 on the host, `sum64` on a GPU.

They guard against defects and broken hardware, not against forgers. A label binds a version to the digests of its content.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import xxhash

from offbeat_ckptsync.errors import DigestError, VersionError
from offbeat_ckptsync.plan.buckets import tensors_in
from offbeat_ckptsync.plan.sum64 import sum64_on_device
from offbeat_ckptsync.values import Bucket, Echo, Label, Manifest, Sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


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
