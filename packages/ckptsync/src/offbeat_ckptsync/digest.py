"""The digest of bytes: xxh3-128, fast enough (about 10 GB/s a core) to check everything that is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from offbeat_ckptsync.errors import DigestError, VersionError
from offbeat_ckptsync.plan import tensors_in

if TYPE_CHECKING:
    import torch

    from offbeat_ckptsync.types import Bucket, Echo, Manifest, Sent


def digest(payload: torch.Tensor) -> str:
    """Return the xxh3-128 digest, in hex, of a contiguous uint8 tensor; bytes on a GPU are copied to the host first."""
    return xxhash.xxh3_128_hexdigest(payload.cpu().numpy().data)


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
    if len(echo.bucket_digests) != len(sent.bucket_digests):
        raise DigestError(f"{who} staged {len(echo.bucket_digests)} buckets of {len(sent.bucket_digests)}")
    for bucket, got, want in zip(buckets, echo.bucket_digests, sent.bucket_digests, strict=True):
        if got != want:
            raise DigestError(
                f"{who}: bucket {bucket.index} of {len(buckets)} arrived with digest {got}, sent with {want}; it "
                f"holds {tensors_in(manifest, bucket)}"
            )
