from __future__ import annotations

import dataclasses
import threading
from itertools import product

import pytest

from offbeat_ckptsync.ends.digest import label_of
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.receiver import TRANSITIONS, Receiver, State, Step
from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.errors import (
    DigestError,
    LoadError,
    ManifestError,
    PhaseError,
    TransferError,
    VersionError,
)
from offbeat_ckptsync.testing import DictSource, assert_same, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from offbeat_ckptsync.values import RankId, Status
from sync_faults.planted import TornSink

CONFIG = SyncConfig(transport="loopback", bucket_mib=4096 / (1 << 20))


class Pair:
    def __init__(self):
        self.source = DictSource(awkward_weights(1))
        self.sender = Sender(self.source, CONFIG)
        self.sink = TornSink(manifest_of(awkward_weights(0).items()))
        self.sink.weights = awkward_weights(0)
        self.receiver = Receiver(RankId(member="m"), self.sink)

    def offer(self, version):
        return self.sender.offer(version, ["m"])

    def stage(self, version, *, reload=False):
        offer = dataclasses.replace(self.offer(version), reload=reload)
        self.receiver.begin(offer)
        out = []
        sending = threading.Thread(target=lambda: out.append(self.sender.send(offer)))
        sending.start()
        self.receiver.transfer(LoopbackTransport())
        sending.join(120)
        return offer, out[0]


@pytest.fixture
def pair():
    return Pair()


def test_a_whole_sync_goes_through_every_state(pair):
    offer, sent = pair.stage(1)
    assert pair.receiver.state is State.STAGED
    assert_same(pair.sink.weights, awkward_weights(0))
    pair.receiver.verify(offer.sync_id, sent)
    assert pair.receiver.state is State.VERIFIED
    flip = pair.receiver.flip(offer.sync_id, sent)
    assert (flip.version, pair.receiver.version, pair.receiver.state) == (1, 1, State.FLIPPED)
    assert_same(pair.sink.weights, awkward_weights(1))
    label = label_of(sent, offer.bucket_bytes)
    assert pair.receiver.status() == Status(version=1, label=label, committed=False, state="flipped")
    assert pair.receiver.commit(label) == label
    assert pair.receiver.status() == Status(version=1, label=label, committed=True, state="idle")
    assert pair.receiver.commit(label) == label  # said twice


def test_a_label_stands_only_for_the_content_that_is_live(pair):
    offer, sent = pair.stage(1)
    label = label_of(sent, offer.bucket_bytes)
    with pytest.raises(VersionError, match="serves version 0 with content nobody vouched for and was asked"):
        pair.receiver.commit(label)
    pair.receiver.flip(offer.sync_id, sent)
    for wrong in ({"content_digest": "0" * 32}, {"version": 2}):
        with pytest.raises(VersionError, match="was asked to commit"):
            pair.receiver.commit(dataclasses.replace(label, **wrong))
    assert not pair.receiver.status().committed
    pair.receiver.commit(label)


def test_content_that_is_not_trusted_is_loaded_again_under_its_version(pair):
    offer, sent = pair.stage(1)
    pair.receiver.flip(offer.sync_id, sent)
    label = pair.receiver.commit(label_of(sent, offer.bucket_bytes))
    pair.sink.weights = awkward_weights(9)  # spoilt behind our back
    pair.receiver.distrust()
    with pytest.raises(VersionError, match="was offered 1"):
        pair.receiver.begin(pair.offer(1))
    offer, sent = pair.stage(1, reload=True)
    pair.receiver.flip(offer.sync_id, sent)
    assert pair.receiver.commit(label) == label
    assert_same(pair.sink.weights, awkward_weights(1))


def test_a_second_content_under_a_served_version_is_refused_before_the_flip(pair):
    offer, sent = pair.stage(1)
    pair.receiver.flip(offer.sync_id, sent)
    pair.receiver.commit(label_of(sent, offer.bucket_bytes))
    pair.source.weights = awkward_weights(2)
    offer, sent = pair.stage(1, reload=True)
    with pytest.raises(VersionError, match="publish it under the next version"):
        pair.receiver.flip(offer.sync_id, sent)
    assert_same(pair.sink.weights, awkward_weights(1))


@pytest.mark.parametrize(("state", "step"), [p for p in product(State, Step) if p not in TRANSITIONS])
def test_every_transition_that_is_not_written_is_refused(pair, state, step):
    pair.receiver._state = state
    with pytest.raises(PhaseError, match=f"is {state}: {step} is not possible"):
        pair.receiver._move(step)
    assert pair.receiver.state is state


def test_versions_must_rise(pair):
    offer, sent = pair.stage(2)
    pair.receiver.flip(offer.sync_id, sent)
    for version in (1, 2):
        with pytest.raises(VersionError, match=f"serves version 2 and was offered {version}"):
            pair.receiver.begin(pair.offer(version))


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"version": 9}, VersionError, "staged version 1 .* but version 9"),
        ({"manifest_digest": "0" * 32}, VersionError, "with manifest 0000"),
        ({"bucket_digests": ()}, DigestError, "buckets of 0"),
    ],
)
def test_a_flip_is_refused_when_staged_content_is_not_what_was_sent(pair, change, error, named):
    offer, sent = pair.stage(1)
    with pytest.raises(error, match=named):
        pair.receiver.flip(offer.sync_id, dataclasses.replace(sent, **change))
    assert_same(pair.sink.weights, awkward_weights(0))
    assert pair.receiver.version == 0
    pair.receiver.flip(offer.sync_id, sent)  # the right word still works


def test_a_wrong_digest_names_the_bucket_and_its_tensors(pair):
    offer, sent = pair.stage(1)
    spoilt = (sent.bucket_digests[0], "f" * 32, *sent.bucket_digests[2:])
    with pytest.raises(DigestError, match=r"bucket 1 of \d+ arrived .* holds .*transposed"):
        pair.receiver.verify(offer.sync_id, dataclasses.replace(sent, bucket_digests=spoilt))


def test_another_syncs_word_cannot_flip_this_one(pair):
    _, sent = pair.stage(1)
    with pytest.raises(PhaseError, match="no open sync other"):
        pair.receiver.flip("other", sent)


def test_a_forged_manifest_is_refused(pair):
    offer = pair.offer(1)
    forged = dataclasses.replace(offer.manifest, specs=offer.manifest.specs[::-1])
    with pytest.raises(ManifestError, match="says digest"):
        pair.receiver.begin(dataclasses.replace(offer, manifest=forged))
    assert pair.receiver.state is State.IDLE


def test_an_abort_keeps_the_version_and_the_next_sync_works(pair):
    offer, _ = pair.stage(1)
    assert pair.receiver.abort(offer.sync_id) == 0
    assert pair.receiver.state is State.IDLE
    assert pair.receiver.abort("") == 0
    offer, sent = pair.stage(1)
    pair.receiver.flip(offer.sync_id, sent)
    assert_same(pair.sink.weights, awkward_weights(1))


def test_a_new_offer_takes_the_place_of_one_whose_manager_died(pair):
    pair.stage(1)
    pair.source.weights = awkward_weights(5)
    offer, sent = pair.stage(2)
    pair.receiver.flip(offer.sync_id, sent)
    assert_same(pair.sink.weights, awkward_weights(5))


def test_a_load_that_tears_breaks_the_receiver_for_good(pair):
    offer, sent = pair.stage(1)
    pair.sink.fail = True
    with pytest.raises(LoadError, match="weights are torn"):
        pair.receiver.flip(offer.sync_id, sent)
    assert pair.receiver.state is State.BROKEN
    with pytest.raises(LoadError):
        pair.receiver.abort(offer.sync_id)
    with pytest.raises(PhaseError):
        pair.receiver.flip(offer.sync_id, sent)


def test_a_sink_that_refuses_before_it_writes_leaves_the_receiver_whole(pair):
    offer, sent = pair.stage(1)
    load, pair.sink.load = pair.sink.load, lambda *_: (_ for _ in ()).throw(ManifestError("no"))
    with pytest.raises(ManifestError, match="no"):
        pair.receiver.flip(offer.sync_id, sent)
    assert pair.receiver.state is State.VERIFIED
    pair.sink.load = load
    pair.receiver.flip(offer.sync_id, sent)
    assert pair.receiver.version == 1


def test_no_label_stands_while_live_weights_are_written(pair):
    offer, sent = pair.stage(1)
    pair.receiver.flip(offer.sync_id, sent)
    pair.receiver.commit(label_of(sent, offer.bucket_bytes))
    pair.source.weights = awkward_weights(2)
    offer, sent = pair.stage(2)
    seen, load = [], pair.sink.load
    pair.sink.load = lambda *given: (seen.append(pair.receiver.status()), load(*given))
    pair.receiver.flip(offer.sync_id, sent)
    assert seen == [Status(version=1, label=None, committed=False, state="flipping")]


def test_a_sink_prepares_what_is_staged_before_anything_is_verified(pair):
    seen = []

    def prepare(tensors, version):
        seen.append((version, pair.receiver.state))
        assert_same(dict(tensors), awkward_weights(1))

    pair.sink.prepare = prepare
    offer, sent = pair.stage(1)
    assert seen == [(1, State.STAGING)]
    pair.receiver.verify(offer.sync_id, sent)
    pair.receiver.flip(offer.sync_id, sent)
    assert_same(pair.sink.weights, awkward_weights(1))
    assert len(seen) == 1


def test_what_cannot_be_prepared_fails_the_sync_and_the_old_weights_are_whole(pair):
    def prepare(tensors, version):
        raise RuntimeError("planted")

    pair.sink.prepare = prepare
    with pytest.raises(TransferError, match=r"preparing version 1: RuntimeError\('planted'\)"):
        pair.stage(1)
    assert pair.receiver.abort("") == 0
    assert_same(pair.sink.weights, awkward_weights(0))
    del pair.sink.prepare
    offer, sent = pair.stage(1)
    pair.receiver.verify(offer.sync_id, sent)
    pair.receiver.flip(offer.sync_id, sent)
    assert_same(pair.sink.weights, awkward_weights(1))
