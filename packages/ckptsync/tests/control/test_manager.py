from __future__ import annotations

import asyncio
import dataclasses
import re
import threading

import numpy as np
import pytest
import torch

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncError, SyncFailed, TransferError, VersionError
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing import (
    DictSource,
    Fault,
    FaultyTransport,
    assert_same,
    awkward_weights,
)
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from offbeat_ckptsync.values import RankId
from sync_faults.planted import LyingSource
from syncs_here import CONFIG, local_of, served


async def test_a_report_says_where_the_time_went():
    local = local_of(served("a", "b", seed=0))
    report = await local.manager.sync(1)
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
    assert local.manager.version == 1


async def test_versions_must_rise_and_somebody_must_be_there():
    local = local_of(served("a", seed=0))
    await local.manager.sync(3)
    with pytest.raises(VersionError, match="version 3 after 3"):
        await local.manager.sync(3)
    local.manager.remove("a")
    with pytest.raises(SyncFailed, match="nobody"):
        await local.manager.sync(4)


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
    local = local_of(sinks)
    local.source.weights = weights
    with pytest.raises(SyncFailed, match=f"version 1: begin: a: .*{named}") as caught:
        await local.manager.sync(1)
    assert caught.value.served == {"a": 0, "b": 0}
    assert_same(sinks["a"].weights, awkward_weights(0))
    local.source.weights = awkward_weights(2)
    await local.manager.sync(1)
    assert_same(sinks["b"].weights, awkward_weights(2))


@pytest.mark.parametrize("where", ["on_send", "on_receive"])
@pytest.mark.parametrize("kind", ["corrupt", "die"])
async def test_a_fault_on_the_way_changes_nothing_and_the_next_sync_is_good(kind, where):
    fault = Fault(kind, 1)
    sinks = served("a", "b", seed=0)
    local = local_of(sinks, lambda: FaultyTransport(LoopbackTransport(), **{where: fault}))
    with pytest.raises(SyncFailed, match="bucket 1"):
        await local.manager.sync(1)
    for sink in sinks.values():
        assert_same(sink.weights, awkward_weights(0))
    local.source.weights = awkward_weights(7)
    await local.manager.sync(1)
    for sink in sinks.values():
        assert_same(sink.weights, awkward_weights(7))


@pytest.mark.parametrize("where", ["on_send", "on_receive"])
async def test_a_side_that_hangs_is_given_up_at_its_deadline(where):
    fault = Fault("hang", 1)
    sinks = served("a", "b", seed=0)
    make = lambda: FaultyTransport(LoopbackTransport(), **{where: fault})  # noqa: E731
    local = local_of(sinks, make, transfer_timeout_s=2, silent="fail")
    with pytest.raises(SyncFailed, match="transfer"):
        await local.manager.sync(1)
    fault.release.set()
    await asyncio.sleep(0.1)
    local.source.weights = awkward_weights(7)
    await local.manager.sync(1)
    for sink in sinks.values():
        assert_same(sink.weights, awkward_weights(7))


async def test_a_source_that_lies_about_itself_changes_nothing():
    sinks = served("a", seed=0)
    local = local_of(sinks, source=LyingSource(without("half"), manifest_of(awkward_weights(0).items())))
    with pytest.raises(SyncFailed, match="where it offered 'half'"):
        await local.manager.sync(1)
    assert_same(sinks["a"].weights, awkward_weights(0))
    assert local.source.walks == 1


async def test_a_late_joiner_is_brought_to_the_committed_version():
    local = local_of(served("a", seed=0))
    late = DictSink()
    joiner = LocalMember(Receiver(RankId(member="late"), late), LoopbackTransport(), gate=NO_TRAFFIC)
    await local.manager.sync(5)
    with pytest.raises(SyncError, match="catch_up"):
        local.manager.add(joiner)
    report = await local.manager.catch_up(joiner)
    assert (report.version, late.version, local.manager.members) == (5, 5, ["a", "late"])
    assert_same(late.weights, awkward_weights(1))
    with pytest.raises(SyncError, match="'late' already"):
        await local.manager.catch_up(joiner)


async def test_two_contents_cannot_have_one_label():
    local = local_of(served("a", seed=0))
    await local.manager.sync(5)
    local.source.weights = awkward_weights(6)  # the trainer has stepped on
    late = DictSink()
    with pytest.raises(SyncFailed, match="no longer those committed as version 5"):
        await local.manager.catch_up(
            LocalMember(Receiver(RankId(member="late"), late), LoopbackTransport(), gate=NO_TRAFFIC)
        )
    assert late.version is None
    assert local.manager.members == ["a"]


async def test_before_the_first_sync_a_joiner_is_simply_a_member():
    local = local_of(served("a", seed=0))
    assert (
        await local.manager.catch_up(
            LocalMember(Receiver(RankId(member="b"), DictSink()), LoopbackTransport(), gate=NO_TRAFFIC)
        )
        is None
    )
    assert local.manager.members == ["a", "b"]


async def test_a_member_that_went_does_not_fail_the_others():
    fault = Fault("die", 1)
    sinks = served("a", "b", seed=0)
    local = local_of(sinks, lambda: FaultyTransport(LoopbackTransport(), on_receive=fault))
    strike = fault.strike

    def leave_and_die(bucket, payload):
        if fault.left and bucket.index == fault.bucket:
            local.manager.remove("b")
        strike(bucket, payload)

    fault.strike = leave_and_die
    report = await local.manager.sync(1)
    assert (fault.left, set(report.members), local.manager.members) == (0, {"a"}, ["a"])
    assert_same(sinks["a"].weights, awkward_weights(1))


@pytest.mark.parametrize("found", [["b"], []])
async def test_who_is_found_lost_after_a_failure_does_not_fail_the_others(found):
    told = []

    async def on_failure(names, failed):
        told.append((names, str(failed)))
        for name in found:
            manager.remove(name)

    local = local_of(served("a", "b", seed=0))
    manager = CheckpointEngineManager(LocalSource(local.sender), CONFIG, on_failure=on_failure)
    manager.add(LocalMember(local.receivers["a"], LoopbackTransport(), gate=NO_TRAFFIC))
    manager.add(
        LocalMember(
            local.receivers["b"],
            FaultyTransport(LoopbackTransport(), on_receive=Fault("die", 1)),
            gate=NO_TRAFFIC,
        )
    )
    if not found:
        with pytest.raises(SyncFailed, match="the line is cut"):
            await manager.sync(1)
    else:
        report = await manager.sync(1)
        assert (set(report.members), [*report.left]) == ({"a"}, ["b"])
        assert_same(local.sinks["a"].weights, awkward_weights(1))
    ((names, why),) = told
    assert names == ["a", "b"]
    assert "b: " in why


async def test_a_joiner_that_serves_the_committed_content_already_is_taken_as_it_is():
    sinks = served("a", "b", seed=0)
    local = local_of(sinks)
    await local.manager.sync(1)
    local.manager.remove("b")
    walks = local.source.walks
    assert (
        await local.manager.catch_up(LocalMember(local.receivers["b"], LoopbackTransport(), gate=NO_TRAFFIC))
        is None
    )
    assert (local.source.walks, local.manager.members) == (walks, ["a", "b"])


async def test_a_manager_refuses_a_label_that_members_know_with_another_content():
    one, two = local_of(served("a", seed=0)), local_of(served("b", seed=0))
    two.source.weights = awkward_weights(2)
    await one.manager.sync(1)
    await two.manager.sync(1)
    fresh = CheckpointEngineManager(LocalSource(one.sender), CONFIG)
    await fresh.catch_up(LocalMember(one.receivers["a"], LoopbackTransport(), gate=NO_TRAFFIC))
    with pytest.raises(VersionError, match="version 1 stands for content"):
        await fresh.catch_up(LocalMember(two.receivers["b"], LoopbackTransport(), gate=NO_TRAFFIC))
    assert fresh.members == ["a"]


class Echoing(LocalMember):
    """Sends other echoes than those of its ranks."""

    bend = staticmethod(lambda echoes: echoes)

    async def transfer(self, sync_id):
        return self.bend(await super().transfer(sync_id))


@pytest.mark.parametrize(
    ("bend", "told"),
    [
        (lambda echoes: [], r"m has 1 ranks and sent echoes of ranks \[\]"),
        (lambda echoes: echoes * 2, r"sent echoes of ranks \[0, 0\]"),
        (lambda echoes: [dataclasses.replace(echoes[0], rank=1)], r"sent echoes of ranks \[1\]"),
        (lambda echoes: [dataclasses.replace(echoes[0], num_ranks=2)], r"m has 2 ranks and sent .* \[0\]"),
        (lambda echoes: [dataclasses.replace(echoes[0], member="n")], "of n among others"),
    ],
    ids=["none", "twice", "another rank", "one of two", "of another"],
)
async def test_a_member_that_does_not_prove_what_every_rank_staged_is_refused(bend, told):
    local, sink = local_of({}), DictSink()
    member = Echoing(Receiver(RankId(member="m"), sink), LoopbackTransport(), gate=NO_TRAFFIC)
    local.manager.add(member)
    member.bend = bend
    with pytest.raises(SyncFailed, match=f"version 1: verify: .*{told}"):
        await local.manager.sync(1)
    assert sink.version is None
    member.bend = Echoing.bend
    await local.manager.sync(1)
    assert_same(sink.weights, awkward_weights(1))


async def test_a_source_that_still_sends_says_so_before_the_manager_stops_waiting():
    local = local_of(served("a", seed=0), begin_timeout_s=2)
    local.sender._sending.acquire()
    with pytest.raises(SyncFailed, match=r"begin: source: .*still sends another sync after 1 s"):
        await local.manager.sync(1)
    local.sender._sending.release()
    await local.manager.sync(1)


class SlowlyGathered(DictSource):
    """Gathers slowly, and to its end whatever becomes of the sync: other ranks take part."""

    def __init__(self, weights):
        super().__init__(weights)
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def tensors(self):
        self.begun.set()
        assert self.goes_on.wait(600)
        yield from super().tensors()


async def test_a_member_that_dies_while_the_source_gathers_slowly_fails_nobody():
    """The walk takes longer than `begin_timeout_s`; the sync without the dead one waits for it."""
    source = SlowlyGathered(awkward_weights(1))
    sinks = served("a", "b", seed=0)
    local = local_of(sinks, source=source, begin_timeout_s=1)

    async def dies(sync_id):
        await asyncio.to_thread(source.begun.wait, 600)
        local.manager.remove("b")
        asyncio.get_running_loop().call_later(1.5, source.goes_on.set)
        raise TransferError("planted: b is dead")

    local.manager._members["b"].transfer = dies
    report = await local.manager.sync(1)
    assert (list(report.members), list(report.left)) == (["a"], ["b"])
    assert_same(sinks["a"].weights, awkward_weights(1))


@pytest.mark.parametrize("version", [True, 2.0, np.int64(2), torch.tensor(2), "2"])
async def test_a_version_that_could_not_travel_is_refused_before_anything_is_asked(version):
    local = local_of(served("a", seed=0))
    with pytest.raises(VersionError, match="a version is a whole number"):
        await local.manager.sync(version)
    assert local.source.walks == 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bucket_mib": -1}, "`bucket_mib` must be above 0 and finite, got -1"),
        ({"bucket_mib": float("nan")}, "`bucket_mib` must be above 0 and finite, got nan"),
        ({"begin_timeout_s": -1}, "`begin_timeout_s` must be above 0 and finite, got -1"),
        ({"transfer_timeout_s": float("inf")}, "`transfer_timeout_s` must be above 0 and finite, got inf"),
        ({"device": "gpu"}, "`device` is one of cpu, cuda, got 'gpu'"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        dataclasses.replace(CONFIG, **settings)
