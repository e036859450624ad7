"""Agents and a manager that find each other at a store; all in this process, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading

import pytest

from offbeat_ckptsync.control.agent import Agent, agent_of
from offbeat_ckptsync.control.carried import CarriedMember
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.membership import Membership, register
from offbeat_ckptsync.ends.manifest import manifest_of
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing import DictSource, assert_same, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.values import RankId, Registration, Status

SECRET = "of the tests only"
CONFIG = SyncConfig(transport="loopback", bucket_mib=4096 / (1 << 20))


class Replica:
    def __init__(self, name, config=CONFIG, secret=SECRET):
        self.sink = DictSink(manifest_of(awkward_weights(0).items()))
        self.receiver = Receiver(RankId(member=name), self.sink)
        self.agent = agent_of(self.receiver, config, secret, gate=NO_TRAFFIC)

    def status(self):
        return self.receiver.status()


class Party:
    """A source and a manager in this process, and whoever joins."""

    def __init__(self, *, collective=False):
        self.source = DictSource(awkward_weights(1))
        self.source.collective = collective

    async def __aenter__(self):
        self.membership = Membership.serve(SECRET, CONFIG)
        self.manager = CheckpointEngineManager(
            LocalSource(Sender(self.source, CONFIG)), CONFIG, on_fence=self.membership.fenced
        )
        await self.membership.start()
        self.membership.attach(self.manager)
        self.replicas = []
        return self

    async def join(self, name):
        replica = Replica(name)
        self.replicas.append(replica)
        await replica.agent.join(*self.membership.address, timeout_s=120)
        await self.membership.wait_for([name], 120)
        return replica

    async def __aexit__(self, *_):
        for replica in self.replicas:
            await replica.agent.close()
        await self.membership.close()


async def until(holds):
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 -- what is waited for happens in another thread or over a socket
            await asyncio.sleep(0.01)


async def test_members_come_late_leave_and_come_back():
    async with Party() as party:
        one = await party.join("one")
        await party.manager.sync(1)
        late = await party.join("late")
        assert late.status() == Status(version=1, label=party.manager.label, committed=True, state="idle")
        await one.agent.leave()
        party.source.weights = awkward_weights(2)
        await until(lambda: "one" not in party.manager.members)
        report = await party.manager.sync(2)
        assert report.members.keys() == {"late"}
        again = await party.join("one")
        assert again.status().version == 2
        assert_same(again.sink.weights, awkward_weights(2))


async def test_a_joiner_waits_for_the_sync_that_runs_and_then_catches_up():
    async with Party() as party:
        await party.join("one")
        walk = party.source.tensors
        joining = []

        def tensors():
            loop.call_soon_threadsafe(lambda: joining.append(asyncio.ensure_future(party.join("late"))))
            party.source.tensors = walk
            yield from walk()

        loop = asyncio.get_running_loop()
        party.source.tensors = tensors
        report = await party.manager.sync(1)
        assert report.members.keys() == {"one"}
        late = await joining[0]
        assert (party.manager.members, late.status().label) == (["one", "late"], party.manager.label)


async def test_a_joiner_gets_the_committed_weights_from_a_peer_when_the_trainer_has_gone_on():
    async with Party() as party:
        await party.join("one")
        await party.manager.sync(1)
        party.source.weights = awkward_weights(2)  # trained on; nobody could get version 1 from here
        late = await party.join("late")
        assert late.status() == Status(version=1, label=party.manager.label, committed=True, state="idle")
        assert_same(late.sink.weights, awkward_weights(1))


async def test_where_nobody_has_the_committed_weights_a_joiner_serves_nothing_until_the_next_sync():
    async with Party() as party:
        one = await party.join("one")
        await party.manager.sync(1)
        one.receiver.distrust()  # drops the copy
        party.source.weights = awkward_weights(2)
        late = await party.join("late")
        assert late.status().committed is False
        assert "no longer those committed" in party.membership.refused["late"]
        await party.manager.sync(2)
        assert late.status().committed is True
        assert_same(late.sink.weights, awkward_weights(2))


async def test_a_joiner_makes_no_rank_of_the_source_gather_alone_where_it_has_several():
    async with Party(collective=True) as party:
        one = await party.join("one")
        await party.manager.sync(1)
        await party.join("two")  # from a peer
        assert party.source.walks == 1
        for replica in party.replicas:
            replica.receiver._pool.forget()  # nobody keeps a copy any more
        late = await party.join("late")
        assert (party.source.walks, late.status().committed) == (1, False)
        await party.manager.sync(2)
        assert party.source.walks == 2
        assert [each.status().version for each in (one, late)] == [2, 2]


async def test_a_rendezvous_that_fails_names_who_is_missing():
    async with Party() as party:
        await party.join("one")
        with pytest.raises(TransferError, match=r"missing after 0.1 s: two, three; here: one"):
            await party.membership.wait_for(["one", "two", "three"], 0.1)


async def test_who_does_not_know_the_secret_is_not_called_and_told_by_name(caplog):
    async with Party() as party:
        stranger = Replica("stranger", secret="a guess")
        with pytest.raises(TransferError, match=r"no manager called within 0\.5 s"):
            await stranger.agent.join(*party.membership.address, timeout_s=0.5)
        with pytest.raises(TransferError, match=r"stranger \(it does not know the secret\)"):
            await party.membership.wait_for(["stranger"], 0.1)
        assert "a guess" not in caplog.text
        assert SECRET not in caplog.text


async def test_rubbish_at_the_store_is_passed_over():
    async with Party() as party:
        store = party.membership._store
        role = {"name": "x", "role": "member", "host": "127.0.0.1", "port": 1}
        rubbish = ("no json", "[]", '{"registration": {"name": 1}}', "\ud800")
        proof = json.dumps({"registration": role, "proof": "\u00e9"})
        for number, text in enumerate((*rubbish, proof)):
            store.set(f"offbeat/member/{number}", text)
            store.set("offbeat/members", str(number))
        gone = Registration(name="gone", role="member", host="127.0.0.1", port=1)
        await register(*party.membership.address, gone, SECRET)
        await party.join("one")
        with pytest.raises(TransferError, match=r"gone \(nobody answers at 127.0.0.1:1"):
            await party.membership.wait_for(["gone"], 0.5)


@pytest.mark.parametrize("mark", ["100000", "many"])
async def test_a_stranger_who_changes_the_mark_of_the_store_holds_up_nobody(mark):
    async with Party() as party:
        await party.join("one")
        store = Store.join(*party.membership.address, 5)  # a line of its own, as a stranger has
        store.set("offbeat/members", mark)
        await party.join("two")
        await party.manager.sync(1)
        assert sorted(party.manager.members) == ["one", "two"]


async def test_an_agent_gives_up_a_sync_when_the_manager_is_silent():
    async with Party() as party:
        one = await party.join("one")
        member = CarriedMember(
            Registration(name="one", role="member"), party.membership._connections["one"].call
        )
        offer = Sender(party.source, CONFIG).offer(1, ["one"])
        await member.begin(dataclasses.replace(offer, silent_s=0.1))
        assert one.receiver.state == "agreed"
        await until(lambda: one.receiver.state == "idle")


async def test_an_agent_that_lost_its_manager_registers_with_the_next_one():
    async with Party() as party:
        one = await party.join("one")
        await party.manager.sync(1)
        store = party.membership._store
        await party.membership.close()
        second = Membership(store, SECRET, CONFIG)
        manager = CheckpointEngineManager(LocalSource(Sender(party.source, CONFIG)), CONFIG)
        await second.start()
        second.attach(manager)
        await second.wait_for(["one"], 120)
        party.source.weights = awkward_weights(2)
        await manager.sync(2)
        assert_same(one.sink.weights, awkward_weights(2))
        await second.close()


def test_an_agent_or_a_manager_without_a_secret_is_refused():
    with pytest.raises(ValueError, match="`secret` is empty"):
        Replica("one", secret="")
    with pytest.raises(ValueError, match="`secret` is empty"):
        Membership.serve("", dataclasses.replace(CONFIG))
    with pytest.raises(ValueError, match="a member or a source"):
        Agent("one", SECRET)


async def test_a_store_that_fails_is_told_of_and_asked_again(monkeypatch, caplog):
    async with Party() as party:

        def fails(self, key):
            raise RuntimeError("the store is gone")

        with monkeypatch.context() as patch:
            patch.setattr(Store, "get", fails)
            joining = asyncio.create_task(party.join("one"), name="join")
            await until(lambda: party.membership._trouble)
            with pytest.raises(
                TransferError, match=r"here: nobody; the store at .* fails: the store is gone"
            ):
                await party.membership.wait_for(["one"], 0.1)
        await joining
        await party.manager.sync(1)
        assert "asking on: the store is gone" in caplog.text


async def test_looking_for_members_starts_no_thread_for_each_look():
    before = threading.Thread.start
    started = []

    def start(thread):
        started.append(thread.name)
        before(thread)

    async with Party() as party:
        await party.join("one")
        threading.Thread.start = start
        try:
            await asyncio.sleep(0.5)  # some 25 looks
        finally:
            threading.Thread.start = before
    assert len(started) <= 2, started


async def test_who_is_let_in_while_an_agent_closes_is_hung_up_on():
    agent = agent_of(Receiver(RankId(member="r"), DictSink({})), SyncConfig(), "a secret", gate=NO_TRAFFIC)
    await agent.start()
    await agent.close()
    late = await asyncio.start_server(
        agent._accept, "127.0.0.1", 0
    )  # as the loop does with what it accepted before
    reader, writer = await asyncio.open_connection(*late.sockets[0].getsockname())
    assert await asyncio.wait_for(reader.read(), 60) == b"", "it was answered"
    writer.close()
    late.close()
