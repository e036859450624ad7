from __future__ import annotations

import dataclasses

import torch

from offbeat_ckptsync.plan.manifest import manifest_of
from offbeat_ckptsync.source.delta_bases import Bases
from offbeat_ckptsync.values import SyncOffer

MANIFEST = manifest_of([("w", torch.zeros(100))])
OFFER = SyncOffer(
    sync_id="s", version=1, manifest=MANIFEST, bucket_bytes=4096, transport="loopback", endpoint={}
)


def pack(contents, digest, *, base="", sync_id="", bucket_bytes=4096):
    offer = dataclasses.replace(OFFER, base=base, sync_id=sync_id or digest, bucket_bytes=bucket_bytes)
    memory = contents.room(offer, 512, "cpu")
    if digest:
        contents.is_whole(digest)
    return memory


def test_the_base_is_kept_and_the_other_memory_is_used_again():
    contents = Bases()
    first = pack(contents, "c1")
    second = pack(contents, "c2", base="c1")
    assert contents.digests(MANIFEST, 4096) == ("c1", "c2")
    third = pack(contents, "c3", base="c2")
    assert third.data_ptr() == first.data_ptr() != second.data_ptr()
    assert contents.digests(MANIFEST, 4096) == ("c2", "c3")
    assert contents.base("c2").data_ptr() == second.data_ptr()
    assert contents.base("c1") is None
    assert contents.base("") is None


def test_members_that_still_hold_the_older_content_decide():
    contents = Bases()
    first = pack(contents, "c1")
    pack(contents, "lost", base="c1")
    assert pack(contents, "c2", base="c1").data_ptr() != first.data_ptr()
    assert contents.digests(MANIFEST, 4096) == ("c1", "c2")


def test_what_was_not_completed_is_no_base_and_its_memory_is_not_used_again():
    contents = Bases()
    pack(contents, "c1")
    torn = pack(contents, "", base="c1")
    contents.drop()
    assert contents.digests(MANIFEST, 4096) == ("c1",)
    assert pack(contents, "c2", base="c1").data_ptr() != torn.data_ptr()


def test_what_was_aborted_is_no_base_and_gives_way_first():
    contents = Bases()
    first = pack(contents, "c1")
    lost = pack(contents, "c2", base="c1")
    contents.aborted("c2")
    assert contents.digests(MANIFEST, 4096) == ("c1",)
    assert pack(contents, "c3").data_ptr() == lost.data_ptr() != first.data_ptr()
    assert contents.digests(MANIFEST, 4096) == ("c1", "c3")


def test_without_a_base_the_newest_content_stays():
    contents = Bases()
    pack(contents, "c1")
    pack(contents, "c2", base="c1")
    pack(contents, "for a joiner")
    assert contents.digests(MANIFEST, 4096) == ("c2", "for a joiner")


def test_contents_of_another_plan_are_no_bases():
    contents = Bases()
    pack(contents, "c1")
    other = manifest_of([("v", torch.zeros(100))])
    assert contents.digests(other, 4096) == ()
    assert contents.digests(MANIFEST, 8192) == ()
    pack(contents, "c2", bucket_bytes=8192)
    assert contents.digests(MANIFEST, 8192) == ("c2",)
