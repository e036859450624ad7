"""Weights may change as soon as they are copied out: what is served then is what they were."""

from __future__ import annotations

import asyncio

import pytest
import torch

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing import DictSource, Fault, FaultyTransport, LocalSync, assert_same
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from offbeat_ckptsync.values import RankId
from syncs_here import local_of, served

CONFIG = SyncConfig(transport="loopback", bucket_mib=1)


class StayingDict(DictSource):
    tensors_stay = True


def large(value):
    """Eight MiB in buckets of one: packing lasts longer than the pass over the tensors."""
    return {f"t{place}": torch.full((1 << 18,), float(value + place)) for place in range(8)}


def train_on(weights):
    for tensor in weights.values():
        tensor.fill_(-1.0)


@pytest.mark.parametrize("kind", [DictSource, StayingDict])
@pytest.mark.parametrize("transport", ["loopback", "shm", "broadcast", "relay", "disk"])
async def test_training_goes_on_while_members_stage(transport, kind, tmp_path):
    config = SyncConfig(transport=transport, bucket_mib=1, disk_path=str(tmp_path))
    sinks = {"a": DictSink(), "b": DictSink()}
    local = LocalSync(kind({}), dict(sinks), config, lambda: make_transport(transport, config))
    try:
        for version in (1, 2, 3):
            local.source.weights = large(version)
            served_then = []

            def train(served_then=served_then):
                served_then.append([receiver.version for receiver in local.receivers.values()])
                train_on(local.source.weights)

            await local.manager.sync(version, gathered=train)
            assert served_then == [[version - 1] * 2], "copied out once, before anybody changes over"
            assert local.source.weights["t0"][0] == -1.0
            for sink in sinks.values():
                assert_same(sink.weights, large(version))
    finally:
        local.close()


@pytest.mark.parametrize("transport", ["shm", "auto"])
async def test_the_weights_are_copied_out_before_members_have_agreed(transport):
    """By `auto` from the second sync on: the first one waits to hear where members are."""
    copied = asyncio.Event()

    class Slow(LocalMember):
        async def begin(self, offer):
            async with asyncio.timeout(600):
                await copied.wait()
            return await super().begin(offer)

    config, sink = SyncConfig(transport=transport), DictSink()
    sender, receiving = Sender(DictSource(large(1)), config), make_transport(transport, config)
    manager = CheckpointEngineManager(LocalSource(sender), config)
    manager.add(Slow(Receiver(RankId(member="slow"), sink), receiving, gate=NO_TRAFFIC))
    copied.set()
    await manager.sync(1)
    copied.clear()
    await manager.sync(2, gathered=copied.set)
    assert_same(sink.weights, large(1))
    sender.close()
    receiving.close()


@pytest.mark.parametrize("kind", ["corrupt", "die"])
async def test_a_sync_that_fails_after_the_weights_have_changed_is_not_run_again(kind):
    fault = Fault(kind, 2)
    sinks = {name: DictSink() for name in "ab"}
    local = LocalSync(
        DictSource(large(0)),
        dict(sinks),
        CONFIG,
        lambda: FaultyTransport(LoopbackTransport(), on_receive=fault),
    )
    fault.left = 0
    await local.manager.sync(1)
    fault.left, local.source.weights = 1, large(1)
    gone = []

    async def leave(names, failed):
        gone.append(names)
        local.manager.remove("b")

    local.manager._on_failure = leave
    with pytest.raises(SyncFailed, match=r"bucket 2|cut"):
        await local.manager.sync(2, gathered=lambda: train_on(local.source.weights))
    assert gone == [["a", "b"]]
    assert_same(sinks["a"].weights, large(0))
    local.source.weights = large(2)
    assert [*(await local.manager.sync(2)).members] == ["a"]
    assert_same(sinks["a"].weights, large(2))


async def test_a_refusal_while_weights_are_copied_leaves_the_old_ones_and_the_next_sync_is_good():
    local = local_of(served("a", seed=0))
    sink = local.sinks["a"]
    before = dict(sink.weights)
    local.source.weights = {"unknown": torch.ones(1 << 22)}
    with pytest.raises(SyncFailed, match=r"begin: a: .*missing tensor"):
        await local.manager.sync(1, gathered=lambda: None)
    assert_same(sink.weights, before)
    local.source.weights = {name: tensor.clone() for name, tensor in before.items()}
    await local.manager.sync(1, gathered=lambda: train_on({}))
    assert_same(sink.weights, before)
