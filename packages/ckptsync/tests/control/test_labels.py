from __future__ import annotations

import dataclasses
import json

import pytest
import xxhash

from offbeat_ckptsync.control.manager import LabelBook
from offbeat_ckptsync.ends.digest import label_of
from offbeat_ckptsync.errors import VersionError
from offbeat_ckptsync.values import Sent

SENT = Sent(
    version=3, manifest_digest="m", bucket_digests=("a", "b"), num_bytes=2, gather_s=0, pack_s=0, wire_s=0
)


def test_a_label_covers_manifest_plan_and_every_bucket():
    label = label_of(SENT, 4096)
    assert label.content_digest == xxhash.xxh3_128_hexdigest(
        json.dumps(["m", 4096, ["a", "b"]]).replace(" ", "").encode()
    )
    others = [
        label_of(dataclasses.replace(SENT, manifest_digest="n"), 4096),
        label_of(dataclasses.replace(SENT, bucket_digests=("b", "a")), 4096),
        label_of(SENT, 8192),
    ]
    assert len({label.content_digest, *(other.content_digest for other in others)}) == 4
    assert label_of(dataclasses.replace(SENT, wire_s=1.0, num_bytes=9), 4096) == label


def test_a_book_refuses_a_second_content_for_a_version():
    book, label = LabelBook(), label_of(SENT, 4096)
    book.bind(label)
    book.bind(label)
    book.bind(dataclasses.replace(label, version=4, content_digest="f"))
    with pytest.raises(
        VersionError, match=r"version 3 stands for content .* publish it under the next version"
    ):
        book.check(dataclasses.replace(label, content_digest="f"))
