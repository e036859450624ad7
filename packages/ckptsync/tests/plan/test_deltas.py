from __future__ import annotations

import itertools
import struct

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from offbeat_ckptsync.errors import DigestError
from offbeat_ckptsync.plan.buckets import plan_buckets
from offbeat_ckptsync.plan.deltas import BLOCK_WORDS, apply_delta, common_base, find_delta, runs_of
from offbeat_ckptsync.plan.manifest import make_manifest
from offbeat_ckptsync.values import TensorSpec

DTYPES = ["uint8", "float8_e4m3fn", "bool", "bfloat16", "int16", "float32", "float64", "int64", "complex128"]
SHAPES = st.lists(st.integers(0, 20), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12).map(
    lambda rows: make_manifest(
        TensorSpec(name=f"t{i}", shape=shape, dtype=dtype) for i, (shape, dtype) in enumerate(rows)
    )
)
BYTES = torch.Generator().manual_seed(0)


def random_bytes(size):
    return torch.randint(0, 256, (size,), generator=BYTES, dtype=torch.uint8)


def changed_at(base, runs, fraction, rng):
    """Return `base` with words changed by one bit each, and their number."""
    fresh, number = base.clone(), 0
    for run in runs:
        for word in range(run.num_words):
            if fraction == 1 or (fraction and rng.random() < fraction):
                fresh[run.start + word * run.word_bytes + rng.randrange(run.word_bytes)] ^= (
                    1 << rng.randrange(8)
                )
                number += 1
    return fresh, number


def slow_delta(runs, base, fresh):
    """Write a delta by the words of the protocol page."""
    old, new = bytes(base.tolist()), bytes(fresh.tolist())
    counts, places, values = b"", b"", b""
    for run in runs:
        of_run, step = b"", run.word_bytes
        words = [(old[at : at + step], new[at : at + step]) for at in range(run.start, run.end, step)]
        for start in range(0, len(words), BLOCK_WORDS):
            block = words[start : start + BLOCK_WORDS]
            found = [place for place, (a, b) in enumerate(block) if a != b]
            counts += struct.pack("<I", len(found))
            places += b"".join(struct.pack("<H", place) for place in found)
            of_run += b"".join(block[place][1] for place in found)
        values += filled(of_run)
    return filled(counts) + filled(places) + values


def filled(part):
    return part + bytes(-len(part) % 8)


@given(SPECS, st.integers(256, 5000), st.sampled_from([0, 0.01, 0.3, 1]), st.randoms(use_true_random=False))
def test_a_delta_of_any_bucket_gives_back_what_it_was_made_from(manifest, bucket_bytes, fraction, rng):
    for bucket in plan_buckets(manifest, bucket_bytes):
        runs = runs_of(manifest, bucket)
        base = random_bytes(bucket.num_bytes)
        fresh, number = changed_at(base, runs, fraction, rng)
        found = find_delta(runs, base, fresh)
        assert (found.num_changed, found.num_words) == (number, sum(run.num_words for run in runs))
        want = slow_delta(runs, base, fresh)
        if len(want) >= bucket.num_bytes:
            assert found.payload is None
            continue
        assert bytes(found.payload.tolist()) == want
        made = base.clone()
        apply_delta(runs, found.payload, made)
        assert torch.equal(made, fresh)


@given(SPECS, st.integers(256, 5000))
@example(
    make_manifest(
        [TensorSpec(name="a", shape=(3,), dtype="uint8"), TensorSpec(name="b", shape=(2,), dtype="int64")]
    ),
    4096,
)
def test_runs_are_the_tensors_of_one_element_size_after_another(manifest, bucket_bytes):
    for bucket in plan_buckets(manifest, bucket_bytes):
        runs = runs_of(manifest, bucket)
        for piece in bucket.pieces:
            size = min(getattr(torch, manifest.specs[piece.spec_index].dtype).itemsize, 8)
            (holder,) = [run for run in runs if run.start <= piece.bucket_offset < run.end]
            assert holder.word_bytes == size
            assert holder.end >= piece.bucket_offset + piece.num_bytes
            assert (piece.bucket_offset - holder.start) % size == 0
        assert all(a.word_bytes != b.word_bytes for a, b in itertools.pairwise(runs))


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
def test_places_beyond_16_bits_and_blocks_without_changes(dtype):
    manifest = make_manifest([TensorSpec(name="a", shape=(3 * BLOCK_WORDS + 7,), dtype=dtype)])
    (bucket,) = plan_buckets(manifest, 1 << 23)
    runs = runs_of(manifest, bucket)
    base = random_bytes(bucket.num_bytes)
    fresh = base.clone()
    words = runs[0].words(fresh)
    for place in (0, 32767, 32768, 65535, 2 * BLOCK_WORDS + 40000, 3 * BLOCK_WORDS + 6):
        words[place] ^= 1
    found = find_delta(runs, base, fresh)
    assert found.num_changed == 6
    assert bytes(found.payload.tolist()) == slow_delta(runs, base, fresh)
    made = base.clone()
    apply_delta(runs, found.payload, made)
    assert torch.equal(made, fresh)


def test_numbers_are_compared_by_their_bits():
    manifest = make_manifest([TensorSpec(name="a", shape=(64,), dtype="float32")])
    (bucket,) = plan_buckets(manifest, 4096)
    base = torch.zeros(64)
    base[1] = float("nan")
    fresh = base.clone()
    fresh[3] = -0.0
    found = find_delta(runs_of(manifest, bucket), base.view(torch.uint8), fresh.view(torch.uint8))
    assert found.num_changed == 1, "NaN is itself, and -0.0 is not 0.0"
    apply_delta(runs_of(manifest, bucket), found.payload, base.view(torch.uint8))
    assert torch.equal(base.view(torch.int32), fresh.view(torch.int32))


def test_what_changed_too_much_goes_whole():
    manifest = make_manifest([TensorSpec(name="a", shape=(1000,), dtype="float32")])
    (bucket,) = plan_buckets(manifest, 4096)
    runs = runs_of(manifest, bucket)
    base = random_bytes(bucket.num_bytes)
    fresh = base.clone()
    fresh[: 4 * 100] ^= 255
    assert find_delta(runs, base, fresh, max_fraction=0.1).payload is not None
    assert find_delta(runs, base, fresh, max_fraction=0.099).payload is None
    assert find_delta(runs, base, base, max_fraction=0.0).payload is not None


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_spoilt_delta_is_refused_or_shows_in_the_bytes(place, flipped):
    manifest = make_manifest(
        [
            TensorSpec(name="a", shape=(500,), dtype="bfloat16"),
            TensorSpec(name="b", shape=(99,), dtype="float32"),
        ]
    )
    (bucket,) = plan_buckets(manifest, 4096)
    runs = runs_of(manifest, bucket)
    base = random_bytes(bucket.num_bytes)
    fresh = base.clone()
    for start in (0, 40, 998, 1024, 1100):
        fresh[start] ^= 1
    delta = find_delta(runs, base, fresh).payload
    spoilt = delta.clone()
    spoilt[place % delta.numel()] ^= flipped
    made = base.clone()
    try:
        apply_delta(runs, spoilt, made)
    except DigestError:
        return
    filling = {*range(8 + 10, 8 + 16), *range(24 + 6, 24 + 8)}  # bytes that no change stands in
    assert torch.equal(made, fresh) == (place % delta.numel() in filling)


@pytest.mark.parametrize("size", [0, 3, 7, 9, 16])
def test_a_delta_of_another_size_is_refused(size):
    manifest = make_manifest([TensorSpec(name="a", shape=(500,), dtype="bfloat16")])
    (bucket,) = plan_buckets(manifest, 4096)
    with pytest.raises(DigestError, match="delta"):
        apply_delta(runs_of(manifest, bucket), torch.zeros(size, dtype=torch.uint8), random_bytes(1000))


@pytest.mark.parametrize(
    ("bases", "held", "base", "why"),
    [
        ((), {"a": "x"}, "", ""),
        (("x", "y"), {"a": "x", "b": "x"}, "x", ""),
        (("x", "y"), {"a": "x", "b": "y"}, "", "different contents"),
        (("x",), {"a": "x", "b": "", "c": None, "d": "z"}, "", "b, c, d kept no copy"),
    ],
)
def test_the_base_is_what_all_members_hold(bases, held, base, why):
    got, told = common_base(bases, held)
    assert got == base
    assert why in told
    assert bool(told) == bool(bases and not base)
