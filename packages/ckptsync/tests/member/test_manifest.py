from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import xxhash

from offbeat_ckptsync.ends.manifest import (
    check_digest,
    diff_manifests,
    make_manifest,
    manifest_digest,
    manifest_of,
    require_match,
)
from offbeat_ckptsync.errors import ManifestError
from offbeat_ckptsync.values import Manifest, TensorSpec

WEIGHTS = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.zeros(1)}


def manifest(**changes):
    return manifest_of({**WEIGHTS, **changes}.items())


def test_the_digest_is_of_the_canonical_json():
    text = json.dumps(
        [["a", [2, 3], "float32"], ["b", [4], "bfloat16"], ["c", [1], "float32"]], separators=(",", ":")
    )
    assert manifest().digest == xxhash.xxh3_128(text.encode()).hexdigest()


@pytest.mark.parametrize("rows_at_a_time", [1, 2, 3, 4])
def test_the_digest_is_the_same_however_much_is_written_at_a_time(monkeypatch, rows_at_a_time):
    whole = manifest().digest
    monkeypatch.setattr("offbeat_ckptsync.ends.manifest._ROWS", rows_at_a_time)
    assert manifest().digest == whole
    assert manifest_digest([]) == xxhash.xxh3_128(b"[]").hexdigest()


def test_the_digest_covers_names_shapes_dtypes_and_order():
    rows = list(WEIGHTS.items())
    others = [
        manifest_of(reversed(rows)),
        manifest_of([("A", rows[0][1]), *rows[1:]]),
        manifest(a=torch.zeros(3, 2)),
        manifest(a=torch.zeros(2, 3, dtype=torch.float16)),
    ]
    assert len({manifest().digest, *(other.digest for other in others)}) == 5


def test_a_forged_digest_is_found():
    check_digest(manifest())
    with pytest.raises(ManifestError, match="digest"):
        check_digest(dataclasses.replace(manifest(), specs=manifest().specs[1:]))


def test_each_difference_is_named():
    offered = manifest_of(
        [("a", torch.zeros(3, 2)), ("b", torch.zeros(4)), ("z", torch.zeros(1))],
    )
    assert diff_manifests(manifest(), offered) == [
        "'a' has shape (3, 2), expected (2, 3)",
        "'b' has dtype float32, expected bfloat16",
        "missing tensor 'c'",
        "unknown tensor 'z'",
    ]
    with pytest.raises(
        ManifestError, match=r"m refuses .*'a' has shape .* unknown tensor 'z' .*nothing was changed"
    ):
        require_match(manifest(), offered, who="m")


def test_order_is_free_and_a_cast_only_where_it_is_allowed():
    assert diff_manifests(manifest(), manifest_of(reversed(WEIGHTS.items()))) == []
    half = manifest(a=torch.zeros(2, 3, dtype=torch.float16))
    assert diff_manifests(manifest(), half)
    assert diff_manifests(manifest(), half, allow_cast=True) == []
    assert diff_manifests(manifest(), manifest(a=torch.zeros(2, 3, dtype=torch.int32)), allow_cast=True)


def test_a_name_twice_or_a_dtype_that_is_none_is_refused():
    spec = TensorSpec(name="a", shape=(1,), dtype="float32")
    with pytest.raises(ManifestError, match="'a' is in the manifest twice"):
        make_manifest([spec, spec])
    with pytest.raises(ManifestError, match="unknown dtype 'Tensor'"):
        make_manifest([spec._replace(dtype="Tensor")])


def test_a_manifest_from_elsewhere_names_each_tensor_once():
    specs = (TensorSpec(name="w", shape=(4,), dtype="float32"),) * 2
    with pytest.raises(ManifestError, match="'w' is in the manifest twice"):
        check_digest(Manifest(specs=specs, digest=manifest_digest(specs)))
