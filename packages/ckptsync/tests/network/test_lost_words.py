"""What an agent and a membership do when a word is lost: an answer that cannot be said, a line that breaks in `begin`, a name
that comes back as somebody else, a flip that ends after its deadline."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest

from offbeat_ckptsync.control.agent import Agent, agent_of
from offbeat_ckptsync.control.carried import CarriedMember
from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.membership import Membership
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import SyncError
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing import DictSource, assert_same, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.values import RankId, Registration

SECRET = "of the tests only"
CONFIG = SyncConfig(transport="loopback", bucket_mib=4096 / (1 << 20))


class Place:
    """A membership with a manager, and agents that have joined it; closes them."""

    def __init__(self, config=CONFIG):
        self.config, self.source, self.agents = config, DictSource(awkward_weights(1)), []

    async def __aenter__(self):
        self.membership = Membership.serve(SECRET, self.config)
        self.manager = CheckpointEngineManager(
            LocalSource(Sender(self.source, self.config)), self.config, on_fence=self.membership.fenced
        )
        await self.membership.start()
        self.membership.attach(self.manager)
        return self

    async def join(self, agent):
        self.agents.append(agent)
        await agent.join(*self.membership.address, timeout_s=120)
        await self.membership.wait_for([agent.name], 120)
        return self.membership._connections[agent.name].call

    async def __aexit__(self, *_):
        for agent in self.agents:
            await agent.close()
        await self.membership.close()


class Slow(DictSink):
    """Loads, or says that it may take an offer, when it is let go on."""

    def __init__(self, waits_in):
        super().__init__()
        self.waits_in, self.waits, self.goes_on = waits_in, threading.Event(), threading.Event()

    def hold(self, where):
        if where == self.waits_in:
            self.waits.set()
            assert self.goes_on.wait(120)

    def expected(self):
        self.hold("begin")
        return super().expected()

    def load(self, tensors, version):
        self.hold("flip")
        super().load(tensors, version)


async def until(holds):
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 -- what is waited for happens in another thread or over a socket
            await asyncio.sleep(0.01)


async def test_an_answer_that_is_no_json_is_told_as_a_failure():
    async def no_json():
        return [object()]

    receiver = Receiver(RankId(member="one"), DictSink())
    async with Place() as place:
        call = await place.join(agent_of(receiver, CONFIG, SECRET, canary=no_json, gate=NO_TRAFFIC))
        member = CarriedMember(Registration(name="one", role="member"), call)
        async with asyncio.timeout(60):
            with pytest.raises(
                SyncError, match="canary: TypeError: Encoding objects of type object is unsupported"
            ):
                await member.canary()
            assert (await member.status()).state == "idle"


async def test_a_sync_that_was_begun_while_the_line_broke_is_given_up():
    sink = Slow("begin")
    receiver = Receiver(RankId(member="one"), sink)
    async with Place() as place:
        agent = agent_of(receiver, CONFIG, SECRET, gate=NO_TRAFFIC)
        member = CarriedMember(Registration(name="one", role="member"), await place.join(agent))
        offer = Sender(place.source, CONFIG).offer(1, ["one"])
        begun = asyncio.create_task(member.begin(dataclasses.replace(offer, silent_s=600.0)), name="begin")
        await until(sink.waits.is_set)
        await place.membership.close()
        await until(lambda: not agent.has_manager)
        moved = []
        receiver._move = lambda step, move=receiver._move: (move(step), moved.append(str(step)))
        sink.goes_on.set()
        await until(lambda: moved)
        await until(lambda: receiver.state == "idle")
        assert moved == ["begin", "abort"]
        with pytest.raises(SyncError):
            await begun


async def test_a_name_that_comes_back_as_another_kind_is_that_member_no_more():
    receiver = Receiver(RankId(member="x"), DictSink())
    async with Place() as place:
        before = agent_of(receiver, CONFIG, SECRET, gate=NO_TRAFFIC)
        await place.join(before)
        assert place.manager.members == ["x"]
        for task in before._tasks:
            task.cancel()  # it does not register again
        before._handle = lambda *_: asyncio.sleep(0)  # nor answer: one that did would keep its name
        await place.join(Agent("x", SECRET, source=LocalSource(Sender(place.source, CONFIG))))
        await until(lambda: not place.manager.members)


async def test_whatever_goes_wrong_while_a_member_catches_up_is_told_and_it_is_tried_again():
    async with Place() as place:
        await place.join(
            agent_of(Receiver(RankId(member="one"), DictSink()), CONFIG, SECRET, gate=NO_TRAFFIC)
        )
        await place.manager.sync(1)
        catch_up, failed = place.manager.catch_up, []

        async def fails_once(member, **how):
            if not failed:
                failed.append(member.name)
                raise RuntimeError("planted")
            return await catch_up(member, **how)

        place.manager.catch_up = fails_once
        late = agent_of(Receiver(RankId(member="late"), DictSink()), CONFIG, SECRET, gate=NO_TRAFFIC)
        joining = asyncio.create_task(place.join(late), name="join")
        await until(lambda: "planted" in place.membership.refused.get("late", ""))
        await joining
        assert place.manager.members == ["one", "late"]


async def test_a_member_whose_flip_ends_after_its_deadline_comes_back():
    sink = Slow("flip")
    receiver = Receiver(RankId(member="two"), sink)
    config = dataclasses.replace(CONFIG, flip_timeout_s=1.0)
    async with Place(config) as place:
        await place.join(
            agent_of(Receiver(RankId(member="one"), DictSink()), config, SECRET, gate=NO_TRAFFIC)
        )
        await place.join(agent_of(receiver, config, SECRET, gate=NO_TRAFFIC))
        report = await place.manager.sync(1)
        assert report.fenced == {"two": "flip: took longer than 1 s"}
        await until(lambda: "still loads" in place.membership.refused.get("two", ""))
        sink.goes_on.set()
        await place.membership.wait_for(["two"], 120)
        assert (receiver.status().label, receiver.status().committed) == (place.manager.label, True)
        assert_same(sink.weights, awkward_weights(1))
