"""One rank of each machine receives, its neighbours read its segment; machines are played by names, on one."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest
import torch

from offbeat_ckptsync.ends import staging
from offbeat_ckptsync.ends.digest import digest
from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncError
from offbeat_ckptsync.testing import DictSource, LocalSync, assert_same, awkward_weights
from offbeat_ckptsync.testing.contract import CASES, check_case, check_transport
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.transports import relay
from offbeat_ckptsync.transports.relay import RelayTransport
from offbeat_ckptsync.values import RankId

CONFIG = SyncConfig(transport="relay", bucket_mib=4096 / (1 << 20))


def on(*machines):
    """Return what makes the transport of the source, then those of the receivers, each on its machine."""
    names = itertools.cycle(machines)
    return lambda: RelayTransport(CONFIG, machine=next(names))


PLACES = {
    "two machines beside the source's": ("s", "a", "a", "b", "b", "b"),
    "one, and the source's": ("s", "s", "a", "a"),
    "the source's alone": ("s", "s", "s"),
    "each its own": ("s", "a", "b"),
}


@pytest.mark.parametrize("machines", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_contract_holds_wherever_ranks_are(case, machines):
    asyncio.run(check_case(case, on(*machines), CONFIG, num_receivers=len(machines) - 1))


@pytest.mark.parametrize("machines", PLACES.values(), ids=PLACES)
def test_faults_are_refused_and_the_next_sync_is_good(machines):
    asyncio.run(check_transport(on(*machines), CONFIG, num_receivers=len(machines) - 1))


async def test_a_landing_is_used_again_once_what_lay_there_was_digested_and_copied(monkeypatch):
    """A GPU's two landing buckets, played by host memory; digests take longer than the wire."""

    def landings(pump):
        size = max(bucket.num_bytes for bucket in pump._buckets)
        return [torch.full((size,), 255, dtype=torch.uint8) for _ in range(2)]

    def late(landed):
        time.sleep(0.01)
        return digest(landed)

    monkeypatch.setattr(relay._Pump, "_landings", landings)
    monkeypatch.setattr(relay, "digest", late)
    sinks = {f"r{i}": DictSink() for i in range(3)}
    local = LocalSync(DictSource(awkward_weights(1)), dict(sinks), CONFIG, on("s", "a", "a", "b"))
    for version in (1, 2):
        local.source.weights = awkward_weights(version)
        assert (await local.manager.sync(version)).num_buckets > 4
        for sink in sinks.values():
            assert_same(sink.weights, awkward_weights(version))
    local.close()


async def test_a_version_crosses_to_each_machine_once_and_is_digested_there_once(monkeypatch):
    machines = ("s", "a", "a", "a", "b", "b")
    sinks = {f"r{i}": DictSink() for i in range(5)}
    local = LocalSync(DictSource(awkward_weights(1)), dict(sinks), CONFIG, on(*machines))
    taken = []
    monkeypatch.setattr(staging, "digest", taken.append)
    for version in (1, 2, 3):
        local.source.weights = awkward_weights(version)
        report = await local.manager.sync(version)
        for sink in sinks.values():
            assert_same(sink.weights, awkward_weights(version))
        num_bytes = report.num_bytes
        assert report.received_bytes == {
            "r0/0": num_bytes,
            "r1/0": 0,
            "r2/0": 0,
            "r3/0": num_bytes,
            "r4/0": 0,
        }
    assert taken == [], "no rank takes a digest of what its relay has taken one of"
    local.close()


async def test_what_one_rank_writes_into_what_it_was_given_is_not_seen_by_its_neighbours():
    class Writing(DictSink):
        def load(self, tensors, version):
            given = list(tensors)
            for _, tensor in given:
                tensor.zero_()
            super().load(given, version)

    sinks = {"r0": Writing(), "r1": DictSink(), "r2": DictSink()}
    local = LocalSync(DictSource(awkward_weights(1)), dict(sinks), CONFIG, on("s", "a", "a", "a"))
    for version in (1, 2, 3):
        local.source.weights = awkward_weights(version)
        await local.manager.sync(version)
        assert_same(sinks["r1"].weights, awkward_weights(version))
        assert_same(sinks["r2"].weights, awkward_weights(version))
        assert not any(tensor.any() for tensor in sinks["r0"].weights.values())
    local.close()


async def test_what_a_relay_received_into_is_not_received_into_again_after_an_abort(monkeypatch):
    """The wire may still bring what was under way; a relay that digests is slow to give up by itself."""
    digests, may_go_on = threading.Event(), threading.Event()

    def slow(landed):
        digests.set()
        assert may_go_on.wait(120)
        return digest(landed)

    monkeypatch.setattr(relay, "digest", slow)
    sender = Sender(DictSource(awkward_weights(1)), CONFIG, transport=RelayTransport(CONFIG, machine="s"))
    rank_id = RelayTransport(CONFIG, machine="a")
    offer = sender.offer(1, ["m"])

    def send():
        with pytest.raises(SyncError):
            sender.send(offer)

    sending = threading.Thread(target=send)
    sending.start()
    end = rank_id.receiver(offer, RankId(member="m"))
    assert digests.wait(120)
    (first,) = rank_id._near._segments
    end.close()
    rank_id.abort(offer.sync_id)
    again = rank_id._near.lend(offer, first.num_bytes)
    may_go_on.set()
    assert first not in rank_id._near._segments
    assert again.data_ptr() == rank_id._near._segments[0].memory.data_ptr()
    sender.abort(offer.sync_id)
    sending.join(120)
    sender.close()
    rank_id.close()
