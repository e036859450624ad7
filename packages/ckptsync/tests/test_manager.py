from __future__ import annotations

import asyncio
import time

import pytest

from offbeat_ckptsync.config import SyncConfig
from offbeat_ckptsync.errors import SyncError, SyncFailed, VersionError
from offbeat_ckptsync.manager import CheckpointEngineManager
from offbeat_ckptsync.manifest import manifest_of
from offbeat_ckptsync.members import LocalMember
from offbeat_ckptsync.receiver import Receiver
from offbeat_ckptsync.sinks import DictSink
from offbeat_ckptsync.source import LocalSource
from offbeat_ckptsync.testing import (
    DictSource,
    Fault,
    FaultyTransport,
    House,
    LyingSource,
    TornSink,
    assert_same,
    awkward_weights,
)
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from offbeat_ckptsync.types import Seat

CONFIG = SyncConfig(
    transport="loopback",
    bucket_mib=4096 / (1 << 20),
    begin_timeout_s=2,
    transfer_timeout_s=2,
    flip_timeout_s=1,
)


def house_of(sinks, make=LoopbackTransport, source=None):
    return House(source or DictSource(awkward_weights(1)), sinks, CONFIG, make)


def served(*names, seed):
    sinks = {name: TornSink(manifest_of(awkward_weights(0).items())) for name in names}
    for sink in sinks.values():
        sink.weights = awkward_weights(seed)
    return sinks


async def test_a_report_says_where_the_time_went():
    house = house_of(served("a", "b", seed=0))
    report = await house.manager.sync(1)
    phases = report.begin_s + report.transfer_s + report.verify_s + report.flip_s + report.commit_s
    assert phases == pytest.approx(report.total_s)
    assert (report.version, report.num_members, report.num_tensors, set(report.members)) == (
        1,
        2,
        11,
        {"a", "b"},
    )
    assert report.num_buckets > 4
    assert report.gb_per_s == pytest.approx(report.num_bytes / report.total_s / 1e9)
    assert house.manager.version == 1


async def test_versions_must_rise_and_somebody_must_be_there():
    house = house_of(served("a", seed=0))
    await house.manager.sync(3)
    with pytest.raises(VersionError, match="version 3 after 3"):
        await house.manager.sync(3)
    house.manager.remove("a")
    with pytest.raises(SyncFailed, match="nobody"):
        await house.manager.sync(4)


def without(name):
    weights = awkward_weights(1)
    del weights[name]
    return weights


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        (without("half"), "missing tensor 'half'"),
        ({**awkward_weights(1), "extra": awkward_weights(1)["half"]}, "unknown tensor 'extra'"),
        (
            {**awkward_weights(1), "half": awkward_weights(1)["mask"]},
            r"'half' has shape \(17,\), expected \(129,\)",
        ),
        ({**awkward_weights(1), "half": awkward_weights(1)["half"].float()}, "'half' has dtype float32"),
    ],
)
async def test_weights_that_do_not_fit_are_refused_by_name(weights, named):
    sinks = served("a", "b", seed=0)
    house = house_of(sinks)
    house.source.weights = weights
    with pytest.raises(SyncFailed, match=f"version 1: begin: a: .*{named}") as caught:
        await house.manager.sync(1)
    assert caught.value.served == {"a": 0, "b": 0}
    assert_same(sinks["a"].weights, awkward_weights(0))
    house.source.weights = awkward_weights(2)
    await house.manager.sync(1)
    assert_same(sinks["b"].weights, awkward_weights(2))


@pytest.mark.parametrize("where", ["on_send", "on_receive"])
@pytest.mark.parametrize("kind", ["corrupt", "die"])
async def test_a_fault_on_the_way_changes_nothing_and_the_next_sync_is_good(kind, where):
    fault = Fault(kind, 1)
    sinks = served("a", "b", seed=0)
    house = house_of(sinks, lambda: FaultyTransport(LoopbackTransport(), **{where: fault}))
    with pytest.raises(SyncFailed, match="bucket 1"):
        await house.manager.sync(1)
    for sink in sinks.values():
        assert_same(sink.weights, awkward_weights(0))
    house.source.weights = awkward_weights(7)
    await house.manager.sync(1)
    for sink in sinks.values():
        assert_same(sink.weights, awkward_weights(7))


@pytest.mark.parametrize("where", ["on_send", "on_receive"])
async def test_a_side_that_hangs_is_given_up_at_its_deadline(where):
    fault = Fault("hang", 1)
    sinks = served("a", "b", seed=0)
    house = house_of(sinks, lambda: FaultyTransport(LoopbackTransport(), **{where: fault}))
    started = time.monotonic()
    with pytest.raises(SyncFailed, match="transfer"):
        await house.manager.sync(1)
    assert time.monotonic() - started < 3 * CONFIG.transfer_timeout_s
    fault.release.set()
    await asyncio.sleep(0.1)
    house.source.weights = awkward_weights(7)
    await house.manager.sync(1)
    for sink in sinks.values():
        assert_same(sink.weights, awkward_weights(7))


async def test_a_source_that_lies_about_itself_changes_nothing():
    sinks = served("a", seed=0)
    house = house_of(sinks, source=LyingSource(without("half"), manifest_of(awkward_weights(0).items())))
    with pytest.raises(SyncFailed, match="where it offered 'half'"):
        await house.manager.sync(1)
    assert_same(sinks["a"].weights, awkward_weights(0))
    assert house.source.walks == 1


async def test_a_member_that_dies_in_the_flip_is_fenced_off_and_the_others_go_on():
    sinks = served("a", "b", seed=0)
    house = house_of(sinks)
    fenced = []

    async def on_fence(name, reason):
        fenced.append((name, reason))

    manager = CheckpointEngineManager(LocalSource(house.publisher), CONFIG, on_fence=on_fence)
    for receiver in house.receivers.values():
        manager.add(LocalMember(receiver, LoopbackTransport()))
    sinks["b"].fail = True
    report = await manager.sync(1)
    assert (manager.members, list(report.members), list(report.fenced)) == (["a"], ["a"], ["b"])
    assert fenced == [("b", report.fenced["b"])]
    assert "torn" in fenced[0][1]
    house.source.weights = awkward_weights(2)
    await manager.sync(2)
    assert_same(sinks["a"].weights, awkward_weights(2))


async def test_when_nobody_changes_over_the_sync_failed():
    sinks = served("a", seed=0)
    sinks["a"].fail = True
    house = house_of(sinks)
    with pytest.raises(SyncFailed, match=r"no member changed over: a: flip: .*torn"):
        await house.manager.sync(1)
    assert house.manager.members == []
    assert house.manager.version is None


class StuckGate:
    async def pause(self):
        await asyncio.sleep(60)

    async def resume(self):
        raise AssertionError("it never paused")


async def test_a_member_that_hangs_in_the_flip_is_fenced_off_at_the_deadline():
    sinks = served("a", seed=0)
    house = house_of(sinks)
    stuck = Receiver(Seat(member="stuck"), DictSink())
    house.manager.add(LocalMember(stuck, LoopbackTransport(), gate=StuckGate()))
    report = await house.manager.sync(1)
    assert report.fenced == {"stuck": "flip: took longer than 1 s"}
    assert house.manager.members == ["a"]


async def test_a_late_joiner_is_brought_to_the_committed_version():
    house = house_of(served("a", seed=0))
    late = DictSink()
    joiner = LocalMember(Receiver(Seat(member="late"), late), LoopbackTransport())
    await house.manager.sync(5)
    with pytest.raises(SyncError, match="catch_up"):
        house.manager.add(joiner)
    report = await house.manager.catch_up(joiner)
    assert (report.version, late.version, house.manager.members) == (5, 5, ["a", "late"])
    assert_same(late.weights, awkward_weights(1))
    with pytest.raises(SyncError, match="'late' already"):
        await house.manager.catch_up(joiner)


async def test_two_contents_cannot_have_one_label():
    house = house_of(served("a", seed=0))
    await house.manager.sync(5)
    house.source.weights = awkward_weights(6)  # the trainer has stepped on
    late = DictSink()
    with pytest.raises(SyncFailed, match="no longer those committed as version 5"):
        await house.manager.catch_up(LocalMember(Receiver(Seat(member="late"), late), LoopbackTransport()))
    assert late.version is None
    assert house.manager.members == ["a"]


async def test_before_the_first_sync_a_joiner_is_simply_a_member():
    house = house_of(served("a", seed=0))
    assert (
        await house.manager.catch_up(LocalMember(Receiver(Seat(member="b"), DictSink()), LoopbackTransport()))
        is None
    )
    assert house.manager.members == ["a", "b"]
