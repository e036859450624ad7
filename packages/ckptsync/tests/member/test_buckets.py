from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_ckptsync.ends.buckets import ALIGNMENT, bucket_starts, bytes_of, gaps, plan_buckets, tensor_views
from offbeat_ckptsync.ends.manifest import make_manifest, manifest_of, num_bytes_of
from offbeat_ckptsync.errors import PlanError
from offbeat_ckptsync.testing import assert_same, awkward_weights
from offbeat_ckptsync.values import TensorSpec

DTYPES = st.sampled_from(["float32", "bfloat16", "uint8", "int64", "bool", "float8_e4m3fn", "complex64"])
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(SHAPES, DTYPES), max_size=30).map(
    lambda rows: make_manifest(TensorSpec(name=f"t{i}", shape=s, dtype=d) for i, (s, d) in enumerate(rows))
)


@given(SPECS, st.integers(256, 20_000))
def test_every_byte_lies_in_exactly_one_place(manifest, max_bytes):
    buckets = plan_buckets(manifest, max_bytes)
    covered = dict.fromkeys(range(len(manifest.specs)), 0)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert 0 < bucket.num_bytes <= max_bytes
        end = 0
        for piece in bucket.pieces:
            assert piece.num_bytes > 0
            assert piece.bucket_offset >= end, "pieces overlap"
            assert piece.bucket_offset % ALIGNMENT == 0
            assert piece.tensor_offset == covered[piece.spec_index], "bytes are skipped or sent twice"
            covered[piece.spec_index] += piece.num_bytes
            end = piece.bucket_offset + piece.num_bytes
        assert end == bucket.num_bytes
    assert covered == {i: num_bytes_of(spec) for i, spec in enumerate(manifest.specs)}


@given(SPECS, st.integers(256, 20_000))
def test_a_tensor_is_in_one_piece_when_buckets_lie_end_to_end(manifest, max_bytes):
    buckets = plan_buckets(manifest, max_bytes)
    starts, _ = bucket_starts(buckets)
    at = {}
    for bucket, start in zip(buckets, starts, strict=True):
        for piece in bucket.pieces:
            begin = start + piece.bucket_offset - piece.tensor_offset
            assert at.setdefault(piece.spec_index, begin) == begin


def slow_pack(weights, manifest, buckets):
    """Byte by byte through Python lists: the reference."""
    packed = []
    for bucket in buckets:
        out = [0] * bucket.num_bytes
        for piece in bucket.pieces:
            tensor = weights[manifest.specs[piece.spec_index].name]
            raw = bytes(
                torch.tensor([*tensor.clone().contiguous().view(-1).view(torch.uint8).tolist()])
                .byte()
                .tolist()
            )
            for i in range(piece.num_bytes):
                out[piece.bucket_offset + i] = raw[piece.tensor_offset + i]
        packed.append(torch.tensor(out, dtype=torch.uint8))
    return packed


@pytest.mark.parametrize("max_bytes", [512, 4096, 1 << 20])
def test_pack_and_unpack_against_the_slow_reference(max_bytes):
    weights = awkward_weights(3)
    manifest = manifest_of(weights.items())
    buckets = plan_buckets(manifest, max_bytes)
    starts, total = bucket_starts(buckets)
    staged = torch.zeros(total, dtype=torch.uint8)
    reference = slow_pack(weights, manifest, buckets)
    for bucket, start in zip(buckets, starts, strict=True):
        for piece in bucket.pieces:
            data = bytes_of(weights[manifest.specs[piece.spec_index].name])
            part = data[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
            staged[start + piece.bucket_offset :][: piece.num_bytes] = part
        assert torch.equal(staged[start : start + bucket.num_bytes], reference[bucket.index])
    assert_same(dict(tensor_views(manifest, buckets, staged)), weights)


def test_gaps_are_what_no_piece_covers():
    manifest = manifest_of([("a", torch.ones(3)), ("b", torch.ones(5)), ("c", torch.ones(1))])
    (bucket,) = plan_buckets(manifest, 4096)
    assert list(gaps(bucket)) == [(12, 256), (276, 512)]


def test_a_bucket_smaller_than_the_alignment_is_refused():
    with pytest.raises(PlanError, match="raise `bucket_mib`"):
        plan_buckets(make_manifest([]), 255)


def test_nothing_to_send_is_no_bucket():
    assert plan_buckets(manifest_of([("empty", torch.empty(0, 3))]), 4096) == ()
