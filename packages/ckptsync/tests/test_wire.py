from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from as_text import dumps, loads
from offbeat_ckptsync.ends.manifest import make_manifest
from offbeat_ckptsync.errors import ManifestError, SyncError, WireError
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.toolkit.wire import (
    decode,
    decode_error,
    encode,
    encode_error,
)
from offbeat_ckptsync.values import (
    Echo,
    Flip,
    Manifest,
    Sent,
    SyncOffer,
    SyncReport,
    TensorSpec,
)  # fmt: skip

OFFER = SyncOffer(
    sync_id="s",
    version=3,
    manifest=make_manifest([TensorSpec(name="w", shape=(2, 3), dtype="float32")]),
    bucket_bytes=4096,
    transport="loopback",
    endpoint={"host": "127.0.0.1", "port": 1, "timeout_s": 1.5},
)
FLIP = Flip(member="m", version=3, pause_s=0.5, load_s=0.25)
VALUES = [
    OFFER,
    FLIP,
    SyncConfig(transport="disk"),
    Echo(member="m", rank=1, version=3, manifest_digest="d", bucket_digests=("a", "b")),
    Sent(version=3, manifest_digest="d", bucket_digests=(), num_bytes=0, gather_s=0.0, pack_s=1.0, wire_s=2.0),
    SyncReport(
        version=3, transport="disk", num_members=1, num_tensors=1, num_buckets=1, num_bytes=1, begin_s=0.0,
        transfer_s=0.0, verify_s=0.0, flip_s=0.0, commit_s=0.0, total_s=1.0, gather_s=0.0, pack_s=0.0, wire_s=0.0,
        pause_s=0.0, load_s=0.0, gb_per_s=0.0, members={"m": FLIP},
    ),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_wire_value_comes_back_as_it_was(value):
    assert loads(type(value), dumps(value)) == value


@given(st.text(), st.lists(st.integers(0, 2**62)).map(tuple))
def test_any_name_and_shape_comes_back(name, shape):
    manifest = Manifest(specs=(TensorSpec(name=name, shape=shape, dtype="float32"),), digest="")
    assert loads(Manifest, dumps(manifest)) == manifest


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"colour": 1}, "unknown field 'colour'"),
        ({"version": "3"}, "SyncOffer.version: Expected `int`, got `str`"),
        ({"version": True}, "Expected `int`, got `bool`"),
        (
            {"manifest": {"specs": [["w", [1.5], "x"]], "digest": ""}},
            r"SyncOffer.manifest.specs\[0\]\[1\]\[0\]: Expected `int`",
        ),
        ({"endpoint": {"host": None}}, "SyncOffer.endpoint"),
    ],
)
def test_what_does_not_belong_is_refused_by_name(change, named):
    with pytest.raises(WireError, match=named):
        decode(SyncOffer, {**encode(OFFER), **change})


def test_a_missing_field_a_closed_set_and_broken_text_are_refused():
    data = encode(OFFER)
    del data["sync_id"]
    with pytest.raises(WireError, match="missing required field `sync_id`"):
        decode(SyncOffer, data)
    with pytest.raises(
        WireError, match=r"SyncConfig: no transport is called .pigeon.; there are auto, broadcast"
    ):
        decode(SyncConfig, {"transport": "pigeon"})
    with pytest.raises(WireError, match="only values"):
        encode({"a": 1})


def test_errors_cross_the_wire_with_their_kind():
    back = decode_error(
        json.loads(json.dumps(encode_error(ManifestError("unknown tensor 'x'")))), where="m: begin"
    )
    assert isinstance(back, ManifestError)
    assert str(back) == "m: begin: unknown tensor 'x'"
    foreign = decode_error(encode_error(OSError("disk full")), where="m")
    assert type(foreign) is SyncError
    assert "OSError: disk full" in str(foreign)


def test_what_comes_with_every_sync_is_written_once():
    written = [encode(dataclasses.replace(OFFER, version=version)) for version in (1, 2)]
    assert written[0]["manifest"] is written[1]["manifest"]


def test_rows_are_read_from_objects_as_from_text():
    """Ray carries JSON objects as they are."""
    assert decode(Manifest, encode(OFFER.manifest)) == OFFER.manifest
    assert {type(row) for row in encode(OFFER.manifest)["specs"]} == {tuple}
