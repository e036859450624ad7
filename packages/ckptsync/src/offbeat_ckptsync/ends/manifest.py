"""Manifests: what a version consists of, its digest, and how two of them differ."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import xxhash

from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.values import Manifest, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable


def make_manifest(specs: Iterable[TensorSpec]) -> Manifest:
    """Return the manifest of `specs`, in their order.

    Raises:
        ManifestError: a name comes twice, a size is negative, or a dtype is not one of torch's.
    """
    ordered = tuple(specs)
    seen: set[str] = set()
    for spec in ordered:
        if spec.name in seen:
            raise ManifestError(f"tensor {spec.name!r} is in the manifest twice; name each tensor once")
        seen.add(spec.name)
        if any(size < 0 for size in spec.shape):
            raise ManifestError(f"tensor {spec.name!r} has shape {spec.shape}; sizes must be >= 0")
        dtype_of(spec.dtype)
    return Manifest(specs=ordered, digest=manifest_digest(ordered))


def manifest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
    """Return the manifest of named tensors, in their order; reads shapes and dtypes only."""
    return make_manifest(
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
        for name, tensor in tensors
    )


def manifest_digest(specs: Iterable[TensorSpec]) -> str:
    """Return the xxh3-128 digest, in hex, of the canonical JSON of `specs`: [[name, shape, dtype], ...], UTF-8."""
    hasher = xxhash.xxh3_128(b"[")
    ordered = tuple(specs)
    for start in range(0, len(ordered), _ROWS):  # in parts: one call for all would hold up other threads
        rows = ordered[start : start + _ROWS]
        canonical = json.dumps(rows, separators=(",", ":"), ensure_ascii=False)[1:-1]
        hasher.update((("," if start else "") + canonical).encode())
    hasher.update(b"]")
    return hasher.hexdigest()


def check_digest(manifest: Manifest) -> None:
    """Make sure that a manifest from elsewhere carries the digest of its own specs.

    Raises:
        ManifestError: it does not, it was changed on the way or made by other rules; or as `make_manifest`.
    """
    if any(each is manifest for each in _checked):  # it comes with every sync
        return
    actual = make_manifest(manifest.specs).digest
    if actual != manifest.digest:
        raise ManifestError(
            f"manifest says digest {manifest.digest}, its {len(manifest.specs)} specs give {actual}; "
            "make manifests with `make_manifest`"
        )
    _checked[:] = [manifest, *_checked[:3]]


_checked: list[Manifest] = []


def diff_manifests(expected: Manifest, offered: Manifest, *, allow_cast: bool = False) -> list[str]:
    """Return one sentence per tensor that is unknown, missing, or of another shape or dtype; empty means they fit.

    Order is free. A floating dtype may differ from the expected floating dtype only with `allow_cast`: a silent
    cast would make what is served differ from what was sent.
    """
    want = {spec.name: spec for spec in expected.specs}
    have = {spec.name: spec for spec in offered.specs}
    problems = [f"unknown tensor {name!r}" for name in have if name not in want]
    problems += [f"missing tensor {name!r}" for name in want if name not in have]
    for name in want.keys() & have.keys():
        if want[name].shape != have[name].shape:
            problems.append(f"{name!r} has shape {have[name].shape}, expected {want[name].shape}")
        if not _fits(want[name].dtype, have[name].dtype, allow_cast=allow_cast):
            problems.append(f"{name!r} has dtype {have[name].dtype}, expected {want[name].dtype}")
    return sorted(problems)


def require_match(expected: Manifest, offered: Manifest, *, who: str, allow_cast: bool = False) -> None:
    """Raise `ManifestError` naming every tensor by which `offered` does not fit what `who` expects."""
    problems = diff_manifests(expected, offered, allow_cast=allow_cast)
    if not problems:
        return
    shown = "; ".join(problems[:_SHOWN]) + (
        f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    )
    hint = " (set `allow_cast` to let floating dtypes be converted)" if " has dtype " in shown else ""
    raise ManifestError(f"{who} refuses the offered weights: {shown}{hint}; nothing was changed")


def num_bytes_of(spec: TensorSpec) -> int:
    """Return the bytes of a tensor, without padding."""
    return math.prod(spec.shape) * dtype_of(spec.dtype).itemsize


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without its prefix, say "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a name; raises `ManifestError` where torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError(f'unknown dtype {name!r}; expected a torch name such as "float32" or "bfloat16"')
    return dtype


_SHOWN = 8
_ROWS = 4096


def _fits(want: str, have: str, *, allow_cast: bool) -> bool:
    if want == have:
        return True
    return allow_cast and dtype_of(want).is_floating_point and dtype_of(have).is_floating_point
