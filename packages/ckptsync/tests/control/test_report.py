from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from offbeat_ckptsync.control.manager import CheckpointEngineManager, memcpy_gb_per_s
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.seams import NO_TRAFFIC, GenerationGate
from offbeat_ckptsync.testing import DictSource, LocalSync, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.values import RankId

CONFIG = SyncConfig(transport="shm", bucket_mib=4096 / (1 << 20))
PHASES = ["begin", "gather", "pack", "wire", "verify", "drain", "load", "flip", "commit"]


class SlowSource(DictSource):
    """Gathers slowly."""

    def tensors(self):
        for name, tensor in super().tensors():
            time.sleep(0.01)
            yield name, tensor


class SlowSink(DictSink):
    """Loads slowly."""

    def load(self, tensors, version):
        time.sleep(0.06)
        super().load(tensors, version)


class SlowGate(GenerationGate):
    """Comes to rest slowly, and goes on slowly."""

    async def pause(self):
        await asyncio.sleep(0.08)

    async def resume(self):
        await asyncio.sleep(0.04)


@pytest.mark.parametrize("transport", ["loopback", "shm", "broadcast", "disk", "auto"])
async def test_the_phases_sum_to_the_wall_time_and_each_says_what_it_is(transport, tmp_path):
    config = dataclasses.replace(CONFIG, transport=transport, disk_path=str(tmp_path))
    sender = Sender(SlowSource(awkward_weights(1)), config)
    manager = CheckpointEngineManager(LocalSource(sender), config)
    ends = [make_transport(transport, config) for _ in range(2)]
    for index, (end, gate) in enumerate(zip(ends, [NO_TRAFFIC, SlowGate()], strict=True)):
        receiver = Receiver(RankId(member=f"m{index}"), SlowSink() if index else DictSink())
        manager.add(LocalMember(receiver, end, gate=gate))
    mark = time.perf_counter()
    report = await manager.sync(1)
    wall_s = time.perf_counter() - mark
    assert list(report.phases) == PHASES
    assert all(seconds >= 0 for seconds in report.phases.values()), report.phases
    assert sum(report.phases.values()) == pytest.approx(report.total_s, rel=1e-6)
    assert report.total_s <= wall_s
    assert report.phases["gather"] >= 0.01 * 11
    assert report.phases["drain"] >= 0.08
    assert report.phases["load"] >= 0.06
    assert report.phases["flip"] >= 0.04
    assert report.pause_s >= 0.18
    assert 0.01 < report.limit_gb_per_s == memcpy_gb_per_s() < 10_000
    assert report.fraction_of_limit == pytest.approx(report.gb_per_s / report.limit_gb_per_s)
    for end in ends:
        end.close()
    sender.close()


class Tokens(GenerationGate):
    """An engine that makes a token at each look while it runs, and then stands still until `resume`."""

    def __init__(self, *, num_running):
        self.num_running, self.count, self.runs, self.looks = num_running, 0, True, 0

    async def pause(self):
        self.runs = False

    async def resume(self):
        self.runs = True

    async def tokens(self):
        self.looks += 1
        self.count += self.runs
        return self.count if self.num_running else None


@pytest.mark.parametrize(("num_running", "answers"), [(1, True), (0, True), (1, False)])
async def test_the_report_names_the_worst_gap_between_two_tokens(num_running, answers):
    sender = Sender(DictSource(awkward_weights(1)), CONFIG)
    manager = CheckpointEngineManager(LocalSource(sender), CONFIG)
    end, gate = make_transport("shm", CONFIG), Tokens(num_running=num_running)
    manager.add(LocalMember(Receiver(RankId(member="m"), SlowSink()), end, gate=gate))
    if not answers:
        gate.tokens = None  # to ask it raises, which is no failure of a sync
    report = await manager.sync(1)
    looks = gate.looks
    if num_running and answers:
        assert report.load_s <= report.worst_gap_s <= report.total_s
        assert report.members["m"].gap_s == report.worst_gap_s
    else:
        assert report.worst_gap_s is None
    await asyncio.sleep(0.05)
    assert gate.looks == looks  # a sync that is over looks no more
    end.close()
    sender.close()


@pytest.mark.parametrize(
    ("transport", "told"),
    [
        ("auto", "version 1 went by `shm`: all 1 receiving ranks are on the source's machine"),
        ("disk", "`disk`, as its settings say"),
    ],
)
async def test_the_log_says_once_how_weights_go_and_why(transport, told, tmp_path, caplog):
    caplog.set_level("INFO", "offbeat_ckptsync.control.manager")
    config = SyncConfig(transport=transport, disk_path=str(tmp_path))
    local = LocalSync(
        DictSource(awkward_weights(1)), {"m": DictSink()}, config, lambda: make_transport(transport, config)
    )
    try:
        for version in (1, 2):
            await local.manager.sync(version)
    finally:
        local.close()
    (record,) = caplog.records
    assert told in record.getMessage()
