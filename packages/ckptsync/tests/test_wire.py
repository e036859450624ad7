from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_ckptsync.config import SyncConfig
from offbeat_ckptsync.control.carried import CarriedMember
from offbeat_ckptsync.errors import ManifestError, SyncError, WireError
from offbeat_ckptsync.plan.manifest import make_manifest
from offbeat_ckptsync.values import (
    Bucket,
    Cell,
    Cut,
    Echo,
    Flip,
    Layout,
    Piece,
    Registration,
    Sent,
    SyncOffer,
    SyncReport,
    TensorSpec,
)  # fmt: skip
from offbeat_ckptsync.wire import decode, decode_as, decode_error, dumps, encode, encode_error, loads, plain

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
    Bucket(index=0, num_bytes=8, pieces=(Piece(spec_index=0, tensor_offset=0, bucket_offset=0, num_bytes=8),)),
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
    spec = TensorSpec(name=name, shape=shape, dtype="float32")
    assert loads(TensorSpec, dumps(spec)) == spec


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"colour": 1}, "unknown field 'colour'"),
        ({"version": "3"}, r"SyncOffer.version: expected int, got '3'"),
        ({"version": True}, "expected int, got True"),
        (
            {"manifest": {"specs": [{"name": "w", "shape": [1.5], "dtype": "x"}], "digest": ""}},
            r"specs\[0\].shape\[0\]",
        ),
        ({"endpoint": {"host": None}}, "SyncOffer.endpoint.host"),
    ],
)
def test_what_does_not_belong_is_refused_by_name(change, named):
    with pytest.raises(WireError, match=named):
        decode(SyncOffer, {**encode(OFFER), **change})


def test_a_missing_field_a_closed_set_and_broken_text_are_refused():
    data = encode(OFFER)
    del data["sync_id"]
    with pytest.raises(WireError, match="'sync_id' is missing"):
        decode(SyncOffer, data)
    with pytest.raises(
        WireError, match=r"SyncConfig: no transport is called .pigeon.; there are auto, broadcast"
    ):
        decode(SyncConfig, {"transport": "pigeon"})
    with pytest.raises(WireError, match="not JSON"):
        loads(Flip, "{")
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


def test_what_comes_with_every_sync_is_read_and_written_once():
    cut = dataclasses.replace(
        OFFER, whole=OFFER.manifest, cells=tuple(Cell(spec_index=i, starts=(i, 0)) for i in (0, 1))
    )
    first, again = (loads(SyncOffer, dumps(dataclasses.replace(cut, version=version))) for version in (1, 2))
    assert first.cells is again.cells
    assert first.manifest is again.manifest is again.whole
    written = [encode(dataclasses.replace(cut, version=version)) for version in (1, 2)]
    assert written[0]["cells"] is written[1]["cells"]
    assert written[0]["manifest"] is written[1]["manifest"]
    with pytest.raises(WireError, match=r"cells\[1\].spec_index: expected int, got True"):
        decode(
            SyncOffer,
            {**encode(cut), "cells": [*plain(cut.cells)[:1], {"spec_index": True, "starts": [1, 0]}]},
        )


def test_a_layout_is_made_of_few_cuts():
    """A garbage collector that goes through a cut for every tensor and rank would hold up every thread."""
    layout = {f"t{i}": (Cut(dim=0, start=i % 2, length=1),) for i in range(100)}
    got = decode_as(Layout, json.loads(json.dumps(plain(layout))), "layout")
    assert got == layout
    assert len({id(cuts) for cuts in got.values()}) == len({id(cuts[0]) for cuts in got.values()}) == 2
    with pytest.raises(WireError, match=r"layout.t7\[0\].start: expected int, got 'x'"):
        decode_as(Layout, {**plain(layout), "t7": [{"dim": 0, "start": "x", "length": 1}]}, "layout")


async def test_a_member_elsewhere_says_once_what_its_ranks_need():
    asked = []

    async def call(op, request):
        asked.append((op, request))
        return {"ok": {"ranks": [{"t": [{"dim": 0, "start": 0, "length": 1}]}]}}

    member = CarriedMember(Registration(name="m", role="member"), call)
    first = await member.layouts()
    assert first == [{"t": (Cut(dim=0, start=0, length=1),)}]
    assert await member.layouts() is first
    assert asked == [("layouts", {})]
