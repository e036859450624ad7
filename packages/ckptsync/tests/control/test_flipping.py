from __future__ import annotations

import asyncio
import threading

import pytest

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncError, SyncFailed
from offbeat_ckptsync.seams import NO_TRAFFIC, GenerationGate
from offbeat_ckptsync.testing import (
    assert_same,
    awkward_weights,
)
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from offbeat_ckptsync.values import RankId
from syncs_here import CONFIG, local_of, served


async def test_a_member_that_dies_in_the_flip_is_fenced_off_and_the_others_go_on():
    sinks = served("a", "b", seed=0)
    local = local_of(sinks)
    fenced = []

    async def on_fence(name, reason):
        fenced.append((name, reason))

    manager = CheckpointEngineManager(LocalSource(local.sender), CONFIG, on_fence=on_fence)
    for receiver in local.receivers.values():
        manager.add(LocalMember(receiver, LoopbackTransport(), gate=NO_TRAFFIC))
    sinks["b"].fail = True
    report = await manager.sync(1)
    assert (manager.members, list(report.members), list(report.fenced)) == (["a"], ["a"], ["b"])
    assert fenced == [("b", report.fenced["b"])]
    assert "torn" in fenced[0][1]
    local.source.weights = awkward_weights(2)
    await manager.sync(2)
    assert_same(sinks["a"].weights, awkward_weights(2))


async def test_on_fence_may_bring_the_member_back_at_once():
    """It took the manager's turn, for which `catch_up` then waited for ever, and no cancel ended it."""
    sinks = served("a", "b", seed=0)
    local = local_of(sinks)
    members = {
        name: LocalMember(each, LoopbackTransport(), gate=NO_TRAFFIC)
        for name, each in local.receivers.items()
    }
    caught_up = []

    async def on_fence(name, reason):
        caught_up.append((await manager.catch_up(members[name])).version)

    manager = CheckpointEngineManager(LocalSource(local.sender), CONFIG, on_fence=on_fence)
    for member in members.values():
        manager.add(member)
    commit = members["b"].commit

    async def refuses_once(label):
        members["b"].commit = commit
        raise SyncError("planted: not now")

    members["b"].commit = refuses_once
    report = await asyncio.wait_for(manager.sync(1), 60)
    assert (list(report.fenced), caught_up, manager.members) == (["b"], [1], ["a", "b"])
    assert_same(sinks["b"].weights, awkward_weights(1))


async def test_when_nobody_changes_over_the_sync_failed():
    sinks = served("a", seed=0)
    sinks["a"].fail = True
    local = local_of(sinks)
    with pytest.raises(SyncFailed, match=r"no member changed over: a: flip: .*torn"):
        await local.manager.sync(1)
    assert local.manager.members == []
    assert local.manager.version is None


class StuckGate(GenerationGate):
    async def pause(self):
        await asyncio.sleep(600)

    async def resume(self):
        raise AssertionError("it never paused")


async def test_a_member_that_hangs_in_the_flip_is_fenced_off_at_the_deadline():
    sinks = served("a", seed=0)
    local = local_of(sinks, flip_timeout_s=2)
    stuck = Receiver(RankId(member="stuck"), DictSink())
    local.manager.add(LocalMember(stuck, LoopbackTransport(), gate=StuckGate()))
    report = await local.manager.sync(1)
    assert report.fenced == {"stuck": "flip: took longer than 2 s"}
    assert local.manager.members == ["a"]


class RefusingSink(DictSink):
    refuse = False

    def load(self, tensors, version):
        if self.refuse:
            raise SyncError("not now")
        super().load(tensors, version)


async def test_when_all_refuse_in_the_flip_nobody_is_fenced_and_the_label_is_free():
    sinks = {"a": RefusingSink(), "b": RefusingSink()}
    local = local_of(sinks)
    for sink in sinks.values():
        sink.refuse = True
    with pytest.raises(SyncFailed, match=r"a: flip: not now; b: flip: not now") as caught:
        await local.manager.sync(1)
    assert (caught.value.served, local.manager.members) == ({"a": 0, "b": 0}, ["a", "b"])
    for sink in sinks.values():
        sink.refuse = False
    local.source.weights = awkward_weights(2)
    await local.manager.sync(1)
    assert_same(sinks["b"].weights, awkward_weights(2))


async def test_one_that_refuses_in_the_flip_is_fenced_and_catches_up():
    sinks = {"a": RefusingSink(), "b": RefusingSink()}
    local = local_of(sinks)
    sinks["b"].refuse = True
    report = await local.manager.sync(1)
    assert report.fenced == {"b": "flip: not now"} == local.manager.fenced
    sinks["b"].refuse = False
    joiner = LocalMember(local.receivers["b"], LoopbackTransport(), gate=NO_TRAFFIC)
    assert (await local.manager.catch_up(joiner)).members.keys() == {"b"}
    assert local.manager.fenced == {}
    assert_same(sinks["b"].weights, sinks["a"].weights)


def canary_of(sink):
    async def ask():
        return [float(sink.weights["half"].double().sum())]

    return ask


class SlippingSink(DictSink):
    slip = False

    def load(self, tensors, version):
        super().load(tensors, version)
        if self.slip:
            self.weights["half"] = self.weights["half"] + 1


async def test_the_canary_fences_the_odd_one_which_is_loaded_anew():
    sinks = {name: SlippingSink() for name in "abc"}
    local = local_of({})
    members = {
        name: LocalMember(
            Receiver(RankId(member=name), sink), LoopbackTransport(), canary=canary_of(sink), gate=NO_TRAFFIC
        )
        for name, sink in sinks.items()
    }
    for member in members.values():
        local.manager.add(member)
    sinks["c"].slip = True
    report = await local.manager.sync(1)
    assert set(report.members) == {"a", "b"}
    assert "c: " not in report.fenced["c"]
    assert "canary: answers 129 away" in report.fenced["c"]
    assert (await members["c"].status()).label is None
    sinks["c"].slip = False
    await local.manager.catch_up(members["c"])
    assert_same(sinks["c"].weights, awkward_weights(1))
    assert (await members["c"].status()).label == local.manager.label


class Waiting(DictSink):
    """Writes only when it is let."""

    def __init__(self):
        super().__init__()
        self.began, self.go_on = threading.Event(), threading.Event()

    def load(self, tensors, version):
        self.began.set()
        assert self.go_on.wait(120)
        super().load(tensors, version)


class Door(GenerationGate):
    """Counts how often it is closed; fails to close while it is told to."""

    def __init__(self):
        self.closed, self.stuck = 0, False

    async def pause(self):
        self.closed += 1
        if self.stuck:
            raise RuntimeError("stuck half-way")

    async def resume(self):
        self.closed -= 1


async def test_a_sync_cancelled_while_weights_change_is_ended_first():
    local, sink, door = local_of({}), Waiting(), Door()
    local.manager.add(LocalMember(Receiver(RankId(member="m"), sink), LoopbackTransport(), gate=door))
    work = asyncio.create_task(local.manager.sync(1), name="a sync")
    async with asyncio.timeout(120):
        while not sink.began.is_set():  # noqa: ASYNC110 -- set by another thread
            await asyncio.sleep(0.01)
    work.cancel()
    await asyncio.sleep(0.05)
    sink.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert (sink.version, door.closed, local.manager.version, local.manager.members) == (1, 0, 1, ["m"])
    local.source.weights = awkward_weights(2)
    await local.manager.sync(2)
    assert_same(sink.weights, awkward_weights(2))


async def test_a_gate_that_does_not_close_is_a_refusal_and_the_member_stays():
    local, sink, door = local_of({}), DictSink(), Door()
    local.manager.add(LocalMember(Receiver(RankId(member="m"), sink), LoopbackTransport(), gate=door))
    door.stuck = True
    with pytest.raises(SyncFailed, match=r"m: flip: m could not be paused: .*stuck half-way") as caught:
        await local.manager.sync(1)
    assert (caught.value.served, local.manager.members, door.closed) == ({"m": 0}, ["m"], 0)
    door.stuck = False
    await local.manager.sync(1)
    assert_same(sink.weights, awkward_weights(1))
