from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest
import torch
import xxhash

from offbeat_ckptsync.ends.buckets import bytes_of, plan_buckets
from offbeat_ckptsync.ends.buffers import BucketBuilder, Buffers
from offbeat_ckptsync.ends.digest import digest
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.pipeline import gather_weights, walk
from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.errors import ManifestError, PhaseError, TransferError
from offbeat_ckptsync.seams import BucketSender
from offbeat_ckptsync.testing import DictSource, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from offbeat_ckptsync.values import RankId
from sync_faults.planted import LyingSource

CONFIG = SyncConfig(transport="loopback", bucket_mib=4096 / (1 << 20))


class Collector(BucketSender):
    """A sender that keeps what it is given, or fails at one bucket, or hangs."""

    def __init__(self, fail_at=-1, hang_at=-1):
        self.payloads = []
        self.fail_at, self.hang_at = fail_at, hang_at
        self.closed = False
        self.release = threading.Event()

    def send(self, bucket, payload):
        if bucket.index == self.fail_at:
            raise OSError("planted")
        if bucket.index == self.hang_at:
            self.release.wait(600)
        self.payloads.append(payload.clone())

    def waits_for(self):
        return "rank 1 of m"

    def close(self):
        self.closed = True


def send_weights(*given, **options):
    return gather_weights(*given, **options)()


def offer_of(source, config=CONFIG):
    return Sender(source, config).offer(1, [])


class StayingDict(DictSource):
    tensors_stay = True


class RefillingSource(DictSource):
    """Yields every tensor in one buffer, which the next one overwrites."""

    def tensors(self):
        buffer = torch.empty(1 << 16, dtype=torch.uint8)
        for name, tensor in super().tensors():
            view = buffer[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
            yield name, view.copy_(tensor)
            buffer.fill_(255)


@pytest.mark.parametrize("kind", [DictSource, StayingDict, RefillingSource])
def test_what_is_sent_is_the_plan_packed_byte_by_byte(kind):
    source, sender = kind(awkward_weights(1)), Collector()
    offer = offer_of(source)
    sent = send_weights(source, offer, lambda: sender)
    buckets = plan_buckets(offer.manifest, offer.bucket_bytes)
    assert sender.closed
    assert len(buckets) == len(sender.payloads) == len(sent.bucket_digests) > 4
    for bucket, payload in zip(buckets, sender.payloads, strict=True):
        want = bytearray(bucket.num_bytes)  # padding is zero
        for piece in bucket.pieces:
            tensor = source.weights[offer.manifest.specs[piece.spec_index].name].contiguous().reshape(-1)
            raw = bytes(tensor.view(torch.uint8).tolist())[piece.tensor_offset :][: piece.num_bytes]
            want[piece.bucket_offset : piece.bucket_offset + piece.num_bytes] = raw
        assert bytes(payload.tolist()) == bytes(want)
        assert sent.bucket_digests[bucket.index] == xxhash.xxh3_128_hexdigest(bytes(want))


class Overlapping(Collector):
    """One whose buckets leave once the next one has begun, and the last one at the end: who drains after each waits for ever."""

    in_flight = 2

    def __init__(self, num_buckets):
        super().__init__()
        self.begun = [threading.Event() for _ in range(num_buckets)]

    def start(self, bucket, payload):
        self.begun[bucket.index].set()

        def wait():
            after = min(bucket.index + 1, len(self.begun) - 1)
            assert self.begun[after].wait(600), "the next bucket was not begun"
            self.payloads.append(payload.clone())

        return wait


@pytest.mark.parametrize("kind", [DictSource, StayingDict])
def test_a_bucket_is_begun_while_the_one_before_it_is_under_way(kind):
    source = kind(awkward_weights(1))
    offer = offer_of(source)
    plain, overlapping = Collector(), Overlapping(len(plan_buckets(offer.manifest, offer.bucket_bytes)))
    want = send_weights(source, offer, lambda: plain)
    sent = send_weights(source, offer, lambda: overlapping)
    assert sent.bucket_digests == want.bucket_digests
    assert len(overlapping.payloads) == len(plain.payloads) > 4
    assert all(torch.equal(*pair) for pair in zip(plain.payloads, overlapping.payloads, strict=True))


@pytest.mark.parametrize("sender", [Collector(fail_at=0), Collector(fail_at=2), Collector(hang_at=1)])
def test_whatever_fails_the_source_is_walked_to_its_end(sender):
    source = DictSource(awkward_weights(1))
    with pytest.raises(TransferError, match="bucket"):
        send_weights(
            source, offer_of(source, dataclasses.replace(CONFIG, transfer_timeout_s=2)), lambda: sender
        )
    assert source.walks == 1
    sender.release.set()


@pytest.mark.parametrize("tensors", [4, 400])  # late when all is packed, and while there is no room to pack
def test_a_source_that_is_late_says_whom_it_waits_for(tensors):
    sender = Collector(hang_at=0)
    source = DictSource({f"t{i}": torch.ones(64) for i in range(tensors)})
    offer = offer_of(source, dataclasses.replace(CONFIG, transfer_timeout_s=1))
    with pytest.raises(TransferError, match=r"bucket 0 of version 1 did not leave .*waits for rank 1 of m"):
        send_weights(source, offer, lambda: sender)
    sender.release.set()


def test_a_source_knows_which_receiver_takes_nothing():
    source, transport = DictSource({"t": torch.ones(4096)}), LoopbackTransport()
    offer = Sender(source, CONFIG, transport=transport).offer(1, ["a", "b"])
    for member in ("a", "b"):
        transport.receiver(offer, RankId(member=member))
    sender = transport.sender(offer, ["a", "b"])
    buckets = plan_buckets(offer.manifest, offer.bucket_bytes)
    taker = transport.receiver(offer, RankId(member="a"))

    def send_all():
        for bucket in buckets:
            sender.send(bucket, torch.zeros(bucket.num_bytes, dtype=torch.uint8))

    def send():
        with pytest.raises(TransferError, match="rank 0 of b did not take bucket"):
            send_all()

    thread = threading.Thread(target=send)
    thread.start()
    for bucket in buckets[:3]:  # two are under way to each: `b` holds up the third
        taker.receive(bucket, torch.empty(bucket.num_bytes, dtype=torch.uint8))
    deadline = time.monotonic() + 60
    while sender.waits_for() != "rank 0 of b" or len(sender._queues[RankId(member="b")]) < 2:
        assert time.monotonic() < deadline, sender.waits_for()
        time.sleep(0.01)
    transport.abort(offer.sync_id)
    thread.join(60)
    assert not thread.is_alive()


class Poor(Buffers):
    def take(self, number, num_bytes):
        raise torch.OutOfMemoryError("planted")


def test_where_memory_runs_out_the_source_is_walked_to_its_end(monkeypatch):
    source = DictSource(awkward_weights(1))
    with pytest.raises(torch.OutOfMemoryError):
        send_weights(source, offer_of(source), Collector, buffers=Poor)
    assert source.walks == 1

    def add(*_):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(BucketBuilder, "add", add)
    with pytest.raises(torch.OutOfMemoryError):
        send_weights(source, offer_of(source), Collector)
    assert source.walks == 2


def test_a_send_that_was_aborted_before_it_began_walks_too():
    source = DictSource(awkward_weights(1))
    sender = Sender(source, CONFIG)
    offer = sender.offer(1, [])
    sender.abort(offer.sync_id)
    with pytest.raises(PhaseError, match="offer again"):
        sender.send(offer)
    assert source.walks == 1


def test_nothing_of_a_source_is_read_after_a_send_has_failed(monkeypatch):
    source, running = StayingDict(awkward_weights(1)), []
    add = BucketBuilder.add

    def slow(*arguments):
        running.append(1)
        time.sleep(0.05)
        add(*arguments)
        running.pop()

    monkeypatch.setattr(BucketBuilder, "add", slow)
    with pytest.raises(TransferError):
        send_weights(source, offer_of(source), lambda: Collector(fail_at=0))
    assert running == []
    monkeypatch.setattr(BucketBuilder, "add", lambda *_: running.append(1))
    time.sleep(0.2)
    assert running == []


def test_a_sender_that_cannot_open_fails_the_sync_after_the_walk():
    def refuse():
        raise TransferError("nobody came")

    source = DictSource(awkward_weights(1))
    with pytest.raises(TransferError, match="nobody came"):
        send_weights(source, offer_of(source), refuse)
    assert source.walks == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda w: {k: t for k, t in w.items() if k != "half"},
            "yields 'transposed' .* where it offered 'half'",
        ),
        (lambda w: {k: t for k, t in w.items() if k != "head"}, "ended before 'head'"),
        (lambda w: {**w, "extra": torch.ones(1)}, "yields 'extra' after the 11 tensors"),
        (lambda w: {**w, "count": torch.ones(3)}, "yields 'count' .* float32 where it offered 'count'"),
    ],
)
def test_a_source_that_yields_other_than_it_offers_is_found(change, named):
    weights = awkward_weights(1)
    source = LyingSource(change(weights), manifest_of(weights.items()))
    sender = Collector()
    with pytest.raises(ManifestError, match=named):
        send_weights(source, offer_of(source), lambda: sender)
    assert source.walks == 1
    assert not sender.closed, "an incomplete sync must not look complete"


@pytest.mark.parametrize("kind", [DictSource, StayingDict])
def test_the_storage_of_what_was_sent_can_still_be_resized(kind):
    source = kind({"weight": torch.ones(8, 8)})
    send_weights(source, offer_of(source), Collector)
    assert source.weights["weight"].untyped_storage().resizable(), "an engine that moves its weights has to"


class SecondRank(DictSource):
    """Rank 1 of a source that gives tensors to those that send, and to nobody else."""

    def tensors_on(self, senders):
        return ((name, tensor if 1 in senders else None) for name, tensor in self.tensors())


def test_a_rank_that_sends_and_is_given_nothing_is_told_so_after_the_walk():
    source = SecondRank(awkward_weights(1))
    with pytest.raises(ManifestError, match=r"gives this rank nothing of .* none of those that send, \[0\]"):
        send_weights(source, offer_of(source), Collector)
    assert source.walks == 1
    assert send_weights(source, offer_of(source), Collector, senders=[0, 1]).num_bytes > 0


def test_other_ranks_walk_along():
    source = DictSource(awkward_weights(1))
    assert walk(source) == len(source.weights)
    assert source.walks == 1


class Addresses(Collector):
    """Also remembers where payloads lay."""

    def __init__(self, **how):
        super().__init__(**how)
        self.places = set()

    def send(self, bucket, payload):
        self.places.add(payload.data_ptr())
        super().send(bucket, payload)


def test_buffers_are_kept_from_sync_to_sync_but_not_from_one_that_failed():
    source, buffers = StayingDict(awkward_weights(1)), Buffers()

    def send(sender):
        send_weights(source, offer_of(source), lambda: sender, buffers=lambda: buffers)
        return sender.places

    first = send(Addresses())
    assert send(Addresses()) <= (kept := {each.data_ptr() for each in buffers._kept})
    assert first <= kept
    with pytest.raises(TransferError, match="planted"):
        send(Addresses(fail_at=1))
    assert buffers._kept == [], "a transport that failed may still read what it was given"
    assert send(Addresses())


def test_buffers_of_another_size_are_let_go():
    buffers = Buffers()
    small = buffers.take(3, 256)
    buffers.put_back(small)
    assert [each.numel() for each in buffers.take(2, 512)] == [512, 512]
    assert buffers._kept == []


@pytest.mark.parametrize("block_bytes", [96, 1 << 20])
def test_a_digest_of_pieces_is_that_of_the_bucket(monkeypatch, block_bytes):
    monkeypatch.setattr("offbeat_ckptsync.ends.buffers._BLOCK_BYTES", block_bytes)
    source = StayingDict(awkward_weights(1))
    offer = offer_of(source)
    tensors = dict(source.tensors())
    names = [spec.name for spec in offer.manifest.specs]
    for bucket in plan_buckets(offer.manifest, offer.bucket_bytes):
        both = [
            BucketBuilder(
                bucket, torch.full((bucket.num_bytes,), 255, dtype=torch.uint8), digests_pieces=pieces
            )
            for pieces in (False, True)
        ]
        for filling in both:
            for piece in bucket.pieces:
                filling.add(piece, bytes_of(tensors[names[piece.spec_index]]))
        assert both[0].digest() == both[1].digest()
        assert torch.equal(both[0].payload, both[1].payload)


def test_what_copying_spoils_gets_no_digest_that_fits(monkeypatch):
    source = StayingDict(awkward_weights(1))
    offer = offer_of(source)
    copied = np.copyto

    def spoil(into, data):
        copied(into, data)
        into[len(into) // 2 :] ^= 1

    monkeypatch.setattr("offbeat_ckptsync.ends.buffers.np.copyto", spoil)
    collector = Collector()
    told = send_weights(source, offer, lambda: collector).bucket_digests
    arrived = [digest(payload) for payload in collector.payloads]
    assert len(told) == len(arrived) > 1
    assert all(one != other for one, other in zip(told, arrived, strict=True))
