from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from as_text import dumps, loads
from offbeat_ckptsync.config import SyncConfig
from offbeat_ckptsync.errors import ManifestError, SyncError, WireError
from offbeat_ckptsync.plan.manifest import make_manifest
from offbeat_ckptsync.toolkit import wire
from offbeat_ckptsync.toolkit.ops import MEMBER_OPS, beside
from offbeat_ckptsync.toolkit.wire import (
    decode,
    decode_error,
    encode,
    encode_error,
)
from offbeat_ckptsync.values import (
    Bucket,
    Echo,
    Flip,
    Manifest,
    Piece,
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
    manifest = Manifest(specs=(TensorSpec(name=name, shape=shape, dtype="float32"),), digest="")
    assert loads(Manifest, dumps(manifest)) == manifest


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"colour": 1}, "unknown field 'colour'"),
        ({"version": "3"}, r"SyncOffer.version: expected int, got '3'"),
        ({"version": True}, "expected int, got True"),
        (
            {"manifest": {"specs": [["w", [1.5], "x"]], "digest": ""}},
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
    first, again = (
        loads(SyncOffer, dumps(dataclasses.replace(OFFER, version=version))) for version in (1, 2)
    )
    assert first.manifest is again.manifest
    written = [encode(dataclasses.replace(OFFER, version=version)) for version in (1, 2)]
    assert written[0]["manifest"] is written[1]["manifest"]


def test_what_many_members_say_at_once_is_read_by_one_thread():
    """Each of many threads that all compute holds up the event loop in its turn."""
    calls = []

    def read(data, where):
        calls.append(where)
        time.sleep(0.05)  # the others come meanwhile
        return object()

    decoded = wire._Decoded(read)
    with ThreadPoolExecutor(8) as pool:
        got = [*pool.map(lambda i: decoded([[1, 2]], f"m{i}"), range(8))]
    assert len(calls) == 1
    assert len({id(each) for each in got}) == 1


def test_rows_are_read_from_objects_as_from_text():
    """Ray carries JSON objects as they are."""
    assert decode(Manifest, encode(OFFER.manifest)) == OFFER.manifest
    assert {type(row) for row in encode(OFFER.manifest)["specs"]} == {tuple}


async def test_many_values_are_made_one_at_a_time_and_the_loop_goes_on():
    at_work, seen = 0, list[int]()
    started, gate = threading.Event(), threading.Event()

    def work():
        nonlocal at_work
        at_work += 1
        seen.append(at_work)
        started.set()
        assert gate.wait(600)  # an event loop that stood still would never open it
        at_work -= 1
        return "done"

    asked = [asyncio.create_task(beside(MEMBER_OPS, "begin", work)) for _ in range(4)]
    assert await asyncio.to_thread(started.wait, 600)
    assert await beside(MEMBER_OPS, "abort", lambda: "small") == "small"  # waits for nobody
    gate.set()
    assert await asyncio.gather(*asked) == ["done"] * 4
    assert seen == [1] * 4
