from __future__ import annotations

import asyncio
import dataclasses

import pytest

from offbeat_ckptsync.config import SyncConfig, make_transport
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import ControlMember, LocalMember
from offbeat_ckptsync.control.ranks import Mailbox
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.member.rank import Rank
from offbeat_ckptsync.member.receiver import Receiver
from offbeat_ckptsync.member.sinks import DictSink
from offbeat_ckptsync.plan.manifest import manifest_of
from offbeat_ckptsync.source.sender import LocalSource, Sender
from offbeat_ckptsync.testing import DictSource, assert_same
from offbeat_ckptsync.threads import in_thread
from offbeat_ckptsync.values import Cut, Seat
from sliced_weights import sliced, tp_layouts, weights_of


class Replica:
    """A tensor-parallel replica whose ranks are workers in this process."""

    def __init__(self, layouts, expected):
        self.layouts = layouts
        self.sinks = [DictSink(expected, layout) for layout in layouts.values()]
        self.workers = [
            Rank(sink, rank=rank, num_ranks=len(self.sinks)) for rank, sink in enumerate(self.sinks)
        ]

    async def control(self, op, payload):
        if op == "update":
            for worker in self.workers:
                await in_thread(lambda worker=worker: worker.handle(payload), name="rank")

    def close(self):
        for worker in self.workers:
            worker.close()


class Site:
    """A source, a manager and members."""

    def __init__(self, transport, folder):
        self.config = SyncConfig(transport=transport, bucket_mib=1024 / (1 << 20), disk_path=str(folder))
        self.source = DictSource(weights_of(1))
        self.sender = Sender(self.source, self.config)
        self.manager = CheckpointEngineManager(LocalSource(self.sender), self.config)
        self.expected = manifest_of(self.source.weights.items())
        self.replicas, self.sinks, self.closing = {}, {}, []

    def replica(self, name, layouts):
        self.replicas[name] = Replica(layouts, self.expected)
        return ControlMember(name, self.replicas[name].control, mailbox=Mailbox(), config=self.config)

    def local(self, name, layout=None):
        self.sinks[name] = DictSink(self.expected, layout)
        self.closing.append(make_transport(self.config.transport, self.config))
        return LocalMember(Receiver(Seat(member=name), self.sinks[name]), self.closing[-1])

    def check(self):
        for replica in self.replicas.values():
            for sink, layout in zip(replica.sinks, replica.layouts.values(), strict=True):
                assert_same(sink.weights, sliced(self.source.weights, layout))
        for sink in self.sinks.values():
            assert_same(sink.weights, self.source.weights)

    async def sync(self, version):
        self.source.weights = weights_of(version)
        report = await self.manager.sync(version)
        self.check()
        return report

    def close(self):
        for each in [*self.replicas.values(), *self.closing, self.sender]:
            each.close()


@pytest.fixture(params=["loopback", "shm", "broadcast", "disk", "auto"])
def site(request, tmp_path):
    made = Site(request.param, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("num_ranks", [2, 4])
async def test_each_rank_of_a_tensor_parallel_replica_takes_its_slices(site, num_ranks):
    site.manager.add(site.replica("tp", tp_layouts(num_ranks)))
    labels = set()
    for version in (1, 2, 3):
        report = await site.sync(version)
        labels.add(report.content_digest)
        assert sorted(report.rank_bytes) == [f"tp/{rank}" for rank in range(num_ranks)]
        assert max(report.rank_bytes.values()) < 0.75 * report.num_bytes
    assert len(labels) == 3


async def test_members_of_other_degrees_take_one_sync_and_one_label(site):
    site.manager.add(site.replica("two", tp_layouts(2)))
    site.manager.add(site.local("whole"))
    site.manager.add(site.replica("three", tp_layouts(3)))
    for version in (1, 2):
        report = await site.sync(version)
        assert report.rank_bytes["whole/0"] == report.num_bytes
    await site.manager.catch_up(site.replica("four", tp_layouts(4)))
    site.check()
    await site.manager.catch_up(site.local("late"))
    site.check()
    await site.sync(3)


async def test_a_replica_whose_ranks_leave_something_out_is_refused_and_the_old_weights_stay(site):
    site.manager.add(site.replica("tp", tp_layouts(2)))
    await site.sync(1)
    layouts = tp_layouts(2)
    layouts[1]["down"] = (Cut(dim=1, start=21, length=19),)
    hole = site.replica("hole", layouts)
    site.replicas.pop("hole").close()
    with pytest.raises(SyncFailed, match=r"the ranks of hole leave out down\[0:16,20:21\]"):
        await site.manager.catch_up(hole)
    site.check()
    await site.sync(2)


class GivesAll:
    """A transport that knows nothing of audiences: every rank is sent every bucket."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def sender(self, offer, members):
        return self.inner.sender(dataclasses.replace(offer, audiences={}), members)

    def receiver(self, offer, seat):
        inner = self.inner.receiver(dataclasses.replace(offer, audiences={}), seat)

        class Plain:
            picks, receive_delta = False, inner.receive_delta
            lend, receive, close = inner.lend, inner.receive, inner.close
            told, wire_bytes = inner.told, inner.wire_bytes
            start, in_flight = inner.start, inner.in_flight

        return Plain()


async def test_a_transport_that_gives_every_rank_everything_serves_slices_too(monkeypatch):
    monkeypatch.setattr(
        "offbeat_ckptsync.member.rank.make_transport", lambda *given: GivesAll(make_transport(*given))
    )
    site = Site("loopback", "")
    site.sender._transport = GivesAll(site.sender._transport)
    site.manager.add(site.replica("tp", tp_layouts(2)))
    for version in (1, 2):
        report = await site.sync(version)
        assert max(report.rank_bytes.values()) < 0.75 * report.num_bytes
    site.close()


def test_one_rank_of_several_members_is_asked_once():
    site = Site("loopback", "")
    replica = site.replica("tp", tp_layouts(2))
    first = asyncio.run(replica.layouts())
    assert first == [*tp_layouts(2).values()]
    site.replicas["tp"].layouts = {}
    assert asyncio.run(replica.layouts()) is first
    site.close()
