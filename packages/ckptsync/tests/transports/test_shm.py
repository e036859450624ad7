from __future__ import annotations

import dataclasses
import fcntl
import gc
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from offbeat_ckptsync.ends.buckets import plan_buckets, tensor_views
from offbeat_ckptsync.ends.digest import digest
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.ends.staging import stage
from offbeat_ckptsync.errors import LoadError, TransferError
from offbeat_ckptsync.testing import DictSource, LocalSync, assert_same, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.transports.line import Line, call
from offbeat_ckptsync.transports.shm import Mapping, Segment, ShmTransport
from offbeat_ckptsync.values import RankId, SyncOffer
from sync_faults.planted import TornSink

CONFIG = SyncConfig(transport="shm", bucket_mib=4096 / (1 << 20))


class Wire:
    """A source and one receiving rank_id in this process."""

    def __init__(self):
        self.source = DictSource(awkward_weights(1))
        self.transport = ShmTransport()
        self.sender = Sender(self.source, CONFIG, transport=self.transport)
        self.rank_id = ShmTransport()
        self.version = 0

    def stage(self, seed):
        self.version += 1
        self.source.weights = awkward_weights(seed)
        offer = self.sender.offer(self.version, ["m"])
        buckets = plan_buckets(offer.manifest, offer.bucket_bytes)
        sending = threading.Thread(target=lambda: self.sender.send(offer))
        sending.start()
        staged = stage(self.rank_id, offer, RankId(member="m"), buckets)
        sending.join(120)
        return staged, lambda: dict(tensor_views(offer.manifest, buckets, staged.memory))

    def segments(self):
        return [segment.id for segment in self.transport._segments]

    def close(self):
        self.sender.close()
        self.rank_id.close()


@pytest.fixture
def wire():
    made = Wire()
    yield made
    made.close()


def test_what_is_staged_lies_in_the_segment_itself_and_its_memory_is_used_again(wire):
    staged, tensors = wire.stage(1)
    assert staged.kept is None
    assert_same(tensors(), awkward_weights(1))
    before = wire.segments()
    assert staged.close() is None
    staged, tensors = wire.stage(2)
    assert_same(tensors(), awkward_weights(2))
    assert wire.segments() == before
    staged.close()


def test_nothing_that_is_still_held_is_overwritten(wire):
    first, tensors = wire.stage(1)
    held = tensors()
    first.close()  # the sync is over; the tensors are not
    second, more = wire.stage(2)
    third, most = wire.stage(3)
    assert len(wire.segments()) == 3
    assert_same(held, awkward_weights(1))
    assert_same(more(), awkward_weights(2))
    assert_same(most(), awkward_weights(3))
    del held
    second.close()
    third.close()
    gc.collect()
    fourth, tensors = wire.stage(4)
    assert_same(tensors(), awkward_weights(4))
    assert len(wire.segments()) == 1, "what nobody holds is given back"
    fourth.close()


def test_no_more_than_three_segments_are_made_and_who_holds_them_is_named(wire):
    held = [wire.stage(seed) for seed in (1, 2, 3)]
    offer = wire.sender.offer(4, ["m"])
    offer.endpoint["rendezvous_s"] = 0.1
    with pytest.raises(TransferError, match=r"still held, by rank 0 of m \(version 1\), .*\(version 3\)"):
        wire.sender.send(offer)
    assert len(wire.segments()) == 3
    for staged, _ in held:
        staged.close()
    del held, staged
    gc.collect()
    staged, tensors = wire.stage(5)
    assert_same(tensors(), awkward_weights(5))
    staged.close()


def test_a_lease_that_is_given_back_late_is_waited_for(wire):
    held = [wire.stage(seed) for seed in (1, 2, 3)]
    threading.Timer(0.2, lambda: [staged.close() for staged, _ in held]).start()
    num_bytes = wire.transport._segments[0].num_bytes
    assert wire.transport.lend(wire.sender.offer(4, ["m"]), num_bytes).numel() == num_bytes
    assert len(wire.segments()) == 1


@pytest.mark.parametrize("state", ["verified", "broken"])
def test_a_member_that_is_fenced_off_gives_back_what_it_staged(wire, state):
    sink = TornSink()
    receiver = Receiver(RankId(member="m"), sink)
    offer = wire.sender.offer(1, ["m"])
    receiver.begin(offer)
    sent = []
    sending = threading.Thread(target=lambda: sent.append(wire.sender.send(offer)))
    sending.start()
    receiver.transfer(wire.rank_id)
    sending.join(120)
    (segment,) = wire.transport._segments
    assert not segment.is_free()
    if state == "broken":
        sink.fail = True
        with pytest.raises(LoadError):
            receiver.flip(offer.sync_id, sent[0])
    receiver.distrust()
    gc.collect()
    assert segment.is_free()


def test_a_loader_that_writes_into_what_it_was_given_spoils_nothing_for_others_or_later(wire):
    staged, tensors = wire.stage(1)
    (segment,) = wire.transport._segments
    before = segment.memory.clone()
    tensors()["embed"].zero_()
    assert torch.equal(segment.memory, before)
    staged.close()
    for seed in (2, 3):
        staged, tensors = wire.stage(seed)
        assert_same(tensors(), awkward_weights(seed))
        staged.close()


def child(role, *arguments):
    """Run a role of this file in a process of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, role, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def kill(process):
    process.kill()
    process.wait(60)
    process.stdout.close()


def hold(sync_id, endpoint):
    """Stage a segment, say so, and wait to be killed."""
    offer = offer_of(sync_id, json.loads(endpoint))
    staged = stage(ShmTransport(), offer, RankId(member="m"), plan_buckets(offer.manifest, 4096))
    print(staged.digests[0], flush=True)
    time.sleep(600)


def dying_source():
    """Offer, send one bucket, then wait to be killed."""
    transport = ShmTransport()
    sender = Sender(DictSource(awkward_weights(1)), CONFIG, transport=transport)
    offer = sender.offer(1, ["m"])
    print(json.dumps([offer.sync_id, offer.endpoint]), flush=True)
    end = transport.sender(offer, ["m"])
    bucket = plan_buckets(offer.manifest, offer.bucket_bytes)[0]
    end.send(bucket, torch.zeros(bucket.num_bytes, dtype=torch.uint8))
    time.sleep(600)


def offer_of(sync_id, endpoint):
    return SyncOffer(
        sync_id=sync_id, version=1, manifest=manifest_of(awkward_weights(1).items()), bucket_bytes=4096,
        transport="shm", endpoint={**endpoint, "timeout_s": 60.0},
    )  # fmt: skip


def test_a_receiver_that_is_killed_frees_its_segment(wire):
    offer = wire.sender.offer(1, ["m"])
    offer.endpoint["rendezvous_s"] = offer.endpoint["timeout_s"] = 60.0
    process = child("hold", offer.sync_id, json.dumps(offer.endpoint))
    sent = wire.sender.send(offer)
    assert process.stdout.readline().strip() == sent.bucket_digests[0]
    (segment,) = wire.transport._segments
    assert not segment.is_free()
    kill(process)
    assert segment.is_free()


def test_a_source_that_is_killed_is_noticed_at_once_and_leaves_nothing_behind():
    before = {*os.listdir("/dev/shm")}
    process = child("dying_source")
    offer = offer_of(*json.loads(process.stdout.readline()))
    end = ShmTransport().receiver(offer, RankId(member="m"))
    buckets = plan_buckets(offer.manifest, 4096)
    memory = end.lend(1 << 16)
    end.receive(buckets[0], memory[: buckets[0].num_bytes])
    kill(process)
    with pytest.raises(TransferError, match="bucket 1 of version 1: the other side gave up or died"):
        end.receive(buckets[1], memory)
    end.close()
    assert not [name for name in {*os.listdir("/dev/shm")} - before if name.startswith("offbeat")]
    assert str(offer.endpoint["address"]) not in Path("/proc/net/unix").read_text()


def test_the_roll_call_names_who_is_missing_and_an_abort_ends_it():
    config = SyncConfig(transport="shm", begin_timeout_s=0.3)
    sender = Sender(DictSource(awkward_weights(1)), config)
    offer = sender.offer(1, ["b"])
    with pytest.raises(TransferError, match=r"shm: no answer within 0\.3 s .* missing: rank 0 of b"):
        sender.send(offer)
    sender.close()
    sender = Sender(DictSource(awkward_weights(1)), CONFIG)
    offer = sender.offer(1, ["b"])
    threading.Timer(0.1, sender.abort, args=(offer.sync_id,)).start()
    with pytest.raises(TransferError, match="shm: aborted"):
        sender.send(offer)
    sender.close()


def test_a_caller_without_the_secret_or_of_another_sync_gets_no_segment(wire):
    offer = wire.sender.offer(1, ["m"])
    failures = []

    def send():
        try:
            wire.sender.send(offer)
        except TransferError as error:
            failures.append(str(error))

    offer.endpoint["rendezvous_s"] = 1.0
    sending = threading.Thread(target=send)
    sending.start()
    for change in ({"token": "0" * 32}, {"sync": "another"}):
        line = Line.connect(str(offer.endpoint["address"]), time.monotonic() + 60, who="t")
        hello = {
            "sync": offer.sync_id,
            "token": offer.endpoint["token"],
            "member": "m",
            "rank": 0,
            "num_ranks": 1,
        }
        line.send({**hello, "has": [], **change}, time.monotonic() + 60)
        answer, fd = line.receive(time.monotonic() + 60, lambda: False, "t")
        assert "is not open here" in answer["error"]
        assert fd is None
        line.close()
    for words in (b"not json", b"[]", b'{"token": "\xc3\xa9"}'):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(str(offer.endpoint["address"]))
        stranger.send(words)
        stranger.close()
    sending.join(120)
    assert len(failures) == 1
    assert "missing: rank 0 of m" in failures[0]


def test_who_calls_while_a_sync_that_was_given_up_is_still_met_gets_through(wire):
    """A roll call ends a moment after its sync was given up; it may take a call that is for the next one."""
    first = wire.sender.offer(1, ["m"])
    failures = []

    def meet_first():
        try:
            wire.transport.sender(first, ["m"])
        except TransferError as error:
            failures.append(str(error))

    meeting = threading.Thread(target=meet_first)
    meeting.start()
    endpoint = first.endpoint | wire.transport.open("second", ["m"])
    second = dataclasses.replace(first, sync_id="second", endpoint=endpoint)
    early, stranger = (Line.connect(str(endpoint["address"]), time.monotonic() + 60, who="t") for _ in "12")
    hello = {
        "sync": "second",
        "token": endpoint["token"],
        "member": "m",
        "rank": 0,
        "num_ranks": 1,
        "has": [],
    }
    early.send(hello, time.monotonic() + 60)
    stranger.send(hello | {"token": ""}, time.monotonic() + 60)
    stranger.receive(time.monotonic() + 60, lambda: False, "t")  # calls are taken in turn: `early` was, too
    wire.transport.abort(first.sync_id)
    meeting.join(60)
    assert "aborted at the roll call; missing: rank 0 of m" in failures[0]
    second.endpoint["rendezvous_s"] = 1.0
    wire.transport.sender(second, ["m"]).close()
    answer, fd = early.receive(time.monotonic() + 60, lambda: False, "t")
    assert "welcome" in answer
    os.close(fd)
    early.close()
    stranger.close()


def test_a_segment_cannot_shrink_under_a_receiver_and_one_that_could_is_not_taken():
    segment = Segment(10_000)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    with pytest.raises(TransferError, match="not taken"):
        Mapping("x", os.dup(segment.fd), 1 << 20)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 8192)
    assert fcntl.fcntl(loose, fcntl.F_GET_SEALS) == 0
    with pytest.raises(TransferError, match="not taken"):
        Mapping("x", loose, 4096)
    segment.close()


def test_no_memory_is_said_so_and_the_source_is_walked_to_its_end(monkeypatch):
    sender = Sender(source := DictSource(awkward_weights(1)), CONFIG)
    offer = sender.offer(1, ["m"])

    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("offbeat_ckptsync.transports.shm._fill", refuse)
    with pytest.raises(TransferError, match=r"no shared memory for .* bytes"):
        sender.send(offer)
    assert source.walks == 1
    sender.close()


if __name__ == "__main__":
    {"hold": hold, "dying_source": dying_source}[sys.argv[1]](*sys.argv[2:])


@pytest.mark.parametrize("receivers", [1, 3])
async def test_one_of_those_who_read_a_bucket_digests_it(receivers, monkeypatch):
    """Three receivers take as many digests as one, and the kernel is asked only about buckets that others take."""
    taken, asked = Counter(), Counter()
    is_shared = Mapping.is_shared

    def counted(payload):
        taken[payload.data_ptr()] += 1
        return digest(payload)

    def looked(mapping, start, end):
        asked[start] += 1
        return is_shared(mapping, start, end)

    monkeypatch.setattr("offbeat_ckptsync.ends.staging.digest", counted)
    monkeypatch.setattr(Mapping, "is_shared", looked)
    sinks = {f"m{i}": DictSink() for i in range(receivers)}
    local = LocalSync(DictSource(awkward_weights(1)), sinks, CONFIG, ShmTransport)
    try:
        report = await local.manager.sync(1)
        assert sum(taken.values()) == report.num_buckets > receivers
        assert sum(asked.values()) == report.num_buckets * (receivers - 1)
        for sink in sinks.values():
            assert_same(sink.weights, awkward_weights(1))
    finally:
        local.close()


def test_a_segment_is_shared_until_it_is_written_to():
    num_bytes = 8 * mmap.PAGESIZE
    segment = Segment(num_bytes)
    mapping = Mapping(segment.id, os.dup(segment.fd), num_bytes)
    segment.memory.fill_(3)
    page = mmap.PAGESIZE
    assert mapping.is_shared(0, num_bytes)
    mapping.view()[3 * page] = 4
    assert not mapping.is_shared(0, num_bytes)
    assert not mapping.is_shared(3 * page + 1, 3 * page + 2)
    assert not mapping.is_shared(2 * page + 5, 3 * page + 1)  # half a page, and one byte of the next
    assert mapping.is_shared(0, 3 * page)
    assert mapping.is_shared(4 * page, num_bytes)


def test_an_abort_ends_a_send_to_a_rank_that_takes_nothing_more(wire):
    wire.source.weights = {"w": torch.zeros(1 << 22)}
    offer = wire.sender.offer(1, ["m"])
    buckets = plan_buckets(offer.manifest, offer.bucket_bytes)
    memory = wire.transport.lend(offer, 1 << 24)
    sent, failures = [], []

    def send():
        end = wire.transport.sender(offer, ["m"])
        try:
            for bucket in buckets:
                sent.append(bucket.index)
                end.send(bucket, memory[: bucket.num_bytes])
        except TransferError as error:
            failures.append(str(error))

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    line, _, fd = call(offer, RankId(member="m"), {"has": []}, lambda: False)
    assert not os.get_inheritable(fd), "who is started from here would hold all weights"
    os.close(fd)
    before = 0
    while not sent or before < len(sent):  # until nothing moves
        before = len(sent)
        time.sleep(0.5)
    wire.transport.abort(offer.sync_id)
    sending.join(30)
    assert len(sent) < len(buckets)
    assert "did not reach rank 0 of m" in failures[0]
    line.close()
