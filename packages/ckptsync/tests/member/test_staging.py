from __future__ import annotations

import contextlib
import threading

import pytest

from offbeat_ckptsync.ends.buckets import plan_buckets
from offbeat_ckptsync.ends.digest import label_of
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import DigestError, SyncError, TransferError
from offbeat_ckptsync.seams import BucketReceiver
from offbeat_ckptsync.testing import DictSource, Fault, FaultyTransport, assert_same, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from offbeat_ckptsync.values import RankId

CONFIG_BYTES = 4096
CONFIG = SyncConfig(transport="loopback", bucket_mib=4096 / (1 << 20))


class Pair:
    """A source and a receiver without a manager."""

    def __init__(self, sink=None):
        self.source = DictSource(awkward_weights(1))
        self.fault = Fault("corrupt", 1, times=0)
        self.sender = Sender(self.source, CONFIG)
        self.sink = DictSink() if sink is None else sink
        self.receiver = Receiver(RankId(member="m"), self.sink)

    def stage(self, version):
        offer = self.sender.offer(version, ["m"])
        self.receiver.begin(offer)
        out = []

        def send():
            with contextlib.suppress(SyncError):
                out.append(self.sender.send(offer))

        sending = threading.Thread(target=send)
        sending.start()
        try:
            self.receiver.transfer(FaultyTransport(LoopbackTransport(), on_receive=self.fault))
        except SyncError:
            self.sender.abort(offer.sync_id)
            raise
        finally:
            sending.join(120)
        return offer, out[0]

    def verified(self, version):
        offer, sent = self.stage(version)
        self.receiver.verify(offer.sync_id, sent)

    def sync(self, version, **settings):
        offer, sent = self.stage(version, **settings)
        self.receiver.flip(offer.sync_id, sent)
        self.receiver.commit(label_of(sent, offer.bucket_bytes))
        return sent

    def change(self):
        weights = {name: tensor.clone() for name, tensor in self.source.weights.items()}
        weights["transposed"][0] += 1
        self.source.weights = weights


class Overlapping(LoopbackTransport):
    """Buckets arrive once the next one has been asked for: who asks for one after the other waits for ever."""

    def receiver(self, offer, rank_id):
        inner = super().receiver(offer, rank_id)
        last = len(plan_buckets(offer.manifest, offer.bucket_bytes)) - 1
        asked = [threading.Event() for _ in range(last + 1)]

        class Late(BucketReceiver):
            in_flight = 2
            close, receive = inner.close, None

            def start(self, bucket, into):
                asked[bucket.index].set()

                def arrive():
                    assert asked[min(bucket.index + 1, last)].wait(600), "the next bucket was not asked for"
                    inner.receive(bucket, into)

                return arrive

        return Late()


def test_a_bucket_is_asked_for_while_the_one_before_it_is_under_way():
    source, sink = DictSource(awkward_weights(1)), DictSink()
    sender = Sender(source, CONFIG)
    receiver = Receiver(RankId(member="m"), sink)
    offer = sender.offer(1, ["m"])
    receiver.begin(offer)
    sent = []
    sending = threading.Thread(target=lambda: sent.append(sender.send(offer)))
    sending.start()
    receiver.transfer(Overlapping())
    sending.join(600)
    receiver.flip(offer.sync_id, sent[0])
    assert_same(sink.weights, awkward_weights(1))


def test_what_is_staged_leaves_live_weights_until_it_is_loaded():
    pair = Pair()
    pair.sync(1)
    before = {name: tensor.clone() for name, tensor in pair.sink.weights.items()}
    pair.change()
    offer, sent = pair.stage(2)
    assert_same(pair.sink.weights, before)
    pair.receiver.flip(offer.sync_id, sent)
    assert_same(pair.sink.weights, pair.source.weights)


def test_a_spoilt_bucket_is_found_and_leaves_live_weights():
    pair = Pair()
    pair.sync(1)
    before = {name: tensor.clone() for name, tensor in pair.sink.weights.items()}
    pair.change()
    pair.fault.left = 1
    with pytest.raises(DigestError, match="bucket 1"):
        pair.verified(2)
    assert_same(pair.sink.weights, before)
    pair.receiver.abort("")
    pair.sync(2)
    assert_same(pair.sink.weights, pair.source.weights)


class UsingUp(DictSink):
    """Scales the tensors that it is given, in place, as a loader may."""

    def load(self, tensors, version):
        super().load(((name, t.mul_(2) if t.is_floating_point() else t) for name, t in tensors), version)


def test_a_copy_that_the_sink_wrote_to_is_not_held():
    pair = Pair(UsingUp())
    pair.sync(1)
    with pytest.raises(TransferError, match="keeps no copy"):
        pair.receiver.copy()


def test_one_buffer_serves_all_syncs():
    pair = Pair()
    places = set()
    for version in (1, 2, 3):
        pair.change()
        pair.sync(version)
        places.add(pair.receiver.copy()[1][0][1].data_ptr())
    assert len(places) == 1
