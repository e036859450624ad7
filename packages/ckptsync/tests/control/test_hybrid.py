from __future__ import annotations

import pytest

from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.seams import GenerationGate
from offbeat_ckptsync.testing import (
    DictSource,
    Fault,
    FaultyTransport,
    LocalSync,
    assert_same,
    awkward_weights,
)
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from offbeat_ckptsync.values import RankId
from sync_faults.planted import TornSink

CONFIG = SyncConfig(transport="loopback", bucket_mib=4096 / (1 << 20))


class PlainGate(GenerationGate):
    """Writes down what it was told, and what was served then."""

    shares_device = True

    def __init__(self, sink):
        self.sink = sink
        self.log = []

    def note(self, word):
        self.log.append((word, self.sink.version))

    async def pause(self):
        self.note("pause")

    async def resume(self):
        self.note("resume")


class DeviceGate(PlainGate):
    async def sleep(self):
        self.note("sleep")

    async def wake(self, tags):
        self.note(f"wake {tags[0]}")


class Shared:
    """A trainer and one replica that share a device."""

    def __init__(self, gate, fault=None):
        self.sink = TornSink(manifest_of(awkward_weights(0).items()))
        self.sink.weights = awkward_weights(0)
        self.gate = gate(self.sink)
        self.local = LocalSync(DictSource(awkward_weights(1)), {}, CONFIG, LoopbackTransport)
        transport = FaultyTransport(LoopbackTransport(), on_receive=fault)
        self.local.manager.add(
            LocalMember(Receiver(RankId(member="m"), self.sink), transport, gate=self.gate)
        )


@pytest.mark.parametrize(
    ("gate", "told"),
    [
        (
            DeviceGate,
            [("pause", None), ("sleep", None), ("wake weights", None), ("wake kv_cache", 1), ("resume", 1)],
        ),
        (PlainGate, [("pause", None), ("resume", 1)]),
    ],
)
async def test_it_sleeps_from_begin_and_wakes_around_the_flip(gate, told):
    shared = Shared(gate)
    report = await shared.local.manager.sync(1)
    assert shared.gate.log == told
    assert report.members.keys() == {"m"}
    assert_same(shared.sink.weights, awkward_weights(1))
    await shared.local.manager.sync(2)
    assert [word for word, _ in shared.gate.log] == [word for word, _ in told] * 2


async def test_a_failure_before_the_flip_wakes_it_as_it_was():
    shared = Shared(DeviceGate, Fault("corrupt", 1))
    with pytest.raises(SyncFailed, match="bucket 1"):
        await shared.local.manager.sync(1)
    words = ["pause", "sleep", "wake weights", "wake kv_cache", "resume"]
    assert [word for word, _ in shared.gate.log] == words
    assert_same(shared.sink.weights, awkward_weights(0))
    await shared.local.manager.sync(1)
    assert_same(shared.sink.weights, awkward_weights(1))


async def test_one_that_refuses_the_offer_goes_on_generating():
    shared = Shared(DeviceGate)
    del shared.local.source.weights["half"]
    with pytest.raises(SyncFailed, match="missing tensor 'half'"):
        await shared.local.manager.sync(1)
    assert shared.gate.log == []


async def test_one_that_tears_stays_paused():
    shared = Shared(DeviceGate)
    shared.sink.fail = True
    with pytest.raises(SyncFailed, match="torn"):
        await shared.local.manager.sync(1)
    assert "resume" not in [word for word, _ in shared.gate.log]
