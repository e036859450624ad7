"""How a sync ends where others behave badly: members that are cancelled, callbacks that fail, a caller that is cancelled twice."""

from __future__ import annotations

import asyncio
import threading

import pytest

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.errors import LoadError, PhaseError, SyncError, SyncFailed
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing import DictSource, assert_same, awkward_weights
from offbeat_ckptsync.toolkit.threads import in_thread
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from offbeat_ckptsync.values import RankId, Status
from syncs_here import CONFIG, local_of, served


class Failing(LocalMember):
    """Raises `error` in one of its methods."""

    def __init__(self, name, method, error):
        super().__init__(Receiver(RankId(member=name), DictSink()), LoopbackTransport(), gate=NO_TRAFFIC)

        async def fail(*_):
            raise error

        setattr(self, method, fail)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (asyncio.CancelledError(), "flip: what it waited for was cancelled"),
        (TimeoutError("the engine's own"), 'flip: TimeoutError("the engine\'s own")'),
        (KeyError("layer"), "flip: KeyError('layer')"),
        (AssertionError(), "flip: AssertionError()"),
    ],
)
async def test_whatever_ends_a_flip_fences_the_member_and_says_what_it_was(error, says):
    local = local_of(served("a", seed=0))
    local.manager.add(Failing("b", "flip", error))
    report = await local.manager.sync(1)
    assert (set(report.members), report.fenced, local.manager.members) == ({"a"}, {"b": says}, ["a"])


async def test_a_member_that_is_cancelled_fails_the_sync_and_does_not_cancel_who_asked_for_it():
    local = local_of(served("a", seed=0))
    local.manager.add(Failing("b", "transfer", asyncio.CancelledError()))
    with pytest.raises(SyncFailed, match="transfer: b: what it waited for was cancelled"):
        await local.manager.sync(1)
    local.manager.remove("b")
    await local.manager.sync(1)


async def test_no_member_is_called_as_the_sending_side_is():
    local = local_of(served("a", seed=0))
    with pytest.raises(SyncError, match="no member can be called 'source'"):
        local.manager.add(Failing("source", "flip", KeyError()))
    assert local.manager.members == ["a"]


async def test_nobody_is_added_as_one_that_serves_what_others_serve_while_these_change_over():
    local = local_of(served("a", seed=0))
    joiner = LocalMember(Receiver(RankId(member="late"), DictSink()), LoopbackTransport(), gate=NO_TRAFFIC)
    refused = []

    class Adding(LocalMember):
        async def transfer(self, sync_id):
            try:
                local.manager.add(joiner)
            except SyncError as error:
                refused.append(str(error))
            return await super().transfer(sync_id)

    local.manager.add(Adding(Receiver(RankId(member="b"), DictSink()), LoopbackTransport(), gate=NO_TRAFFIC))
    await local.manager.sync(1)
    assert local.manager.members == ["a", "b"]
    assert "a sync is under way; `await catch_up('late')`" in refused[0]
    await local.manager.catch_up(joiner)
    assert (await joiner.status()).label == local.manager.label


async def test_who_is_told_of_a_fence_and_fails_undoes_nothing_of_the_sync():
    told = []

    async def on_fence(name, reason):
        told.append(name)
        raise RuntimeError(f"no place for another {name}")

    local = local_of(served("a", seed=0))
    manager = CheckpointEngineManager(LocalSource(local.sender), CONFIG, on_fence=on_fence)
    manager.add(LocalMember(local.receivers["a"], LoopbackTransport(), gate=NO_TRAFFIC))
    for name in ("b", "c"):
        manager.add(Failing(name, "flip", KeyError("layer")))
    with pytest.raises(RuntimeError, match="no place for another b"):
        await manager.sync(1)
    assert (told, manager.version, manager.members, [*manager.fenced]) == (["b", "c"], 1, ["a"], ["b", "c"])
    await manager.sync(2)


async def test_a_sync_that_is_cancelled_again_and_again_in_the_flip_is_ended_all_the_same():
    local = local_of(served("a", seed=0))
    flips, goes_on = asyncio.Event(), asyncio.Event()

    class Slow(LocalMember):
        async def flip(self, sync_id, sent):
            flips.set()
            await goes_on.wait()
            return await super().flip(sync_id, sent)

    sink = DictSink()
    local.manager.add(Slow(Receiver(RankId(member="b"), sink), LoopbackTransport(), gate=NO_TRAFFIC))
    sync = asyncio.create_task(local.manager.sync(1), name="sync")
    await flips.wait()
    for _ in range(3):
        sync.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await sync
    assert local.manager.version == 1
    assert_same(sink.weights, awkward_weights(1))


async def test_a_fenced_member_that_took_part_in_a_later_sync_is_fenced_no_more():
    local = local_of(served("a", "b", seed=0))
    local.sinks["b"].fail = True
    assert [*(await local.manager.sync(1)).fenced] == ["b"]
    fresh = LocalMember(Receiver(RankId(member="b"), DictSink()), LoopbackTransport(), gate=NO_TRAFFIC)
    local.manager.enlist(fresh)
    assert [*local.manager.fenced] == ["b"]
    await local.manager.sync(2)
    assert (local.manager.members, local.manager.fenced) == (["a", "b"], {})


@pytest.mark.parametrize(
    ("state", "error", "says"),
    [("flipping", PhaseError, "late still loads"), ("broken", LoadError, "late is broken .*start it anew")],
)
@pytest.mark.parametrize("synced", [False, True])
async def test_who_loads_or_is_broken_is_not_brought_in(state, error, says, synced):
    local = local_of(served("a", seed=0))
    if synced:
        await local.manager.sync(1)
    walks = local.source.walks

    class Late(LocalMember):
        async def status(self):
            return Status(version=0, label=None, committed=False, state=state)

    with pytest.raises(error, match=says):
        await local.manager.catch_up(
            Late(Receiver(RankId(member="late"), DictSink()), LoopbackTransport(), gate=NO_TRAFFIC)
        )
    assert (local.manager.members, local.source.walks) == (["a"], walks)


async def test_an_offer_that_nobody_waits_for_any_more_does_not_take_the_place_of_the_next_one():
    offers, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Late(LoopbackTransport):
        def open(self, sync_id, members):
            if offers.is_set():
                return super().open(sync_id, members)
            offers.set()
            assert goes_on.wait(120)
            try:
                return super().open(sync_id, members)
            finally:
                ended.set()

    class Letting(LocalMember):
        async def begin(self, offer):
            goes_on.set()
            assert await in_thread(lambda: ended.wait(120), name="wait")
            return await super().begin(offer)

    sender = Sender(DictSource(awkward_weights(1)), CONFIG, transport=Late())
    manager = CheckpointEngineManager(LocalSource(sender), CONFIG)
    sink = DictSink()
    manager.add(Letting(Receiver(RankId(member="a"), sink), LoopbackTransport(), gate=NO_TRAFFIC))
    first = asyncio.create_task(manager.sync(1), name="first")
    assert await in_thread(lambda: offers.wait(120), name="wait")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    asyncio.get_running_loop().call_later(0.2, goes_on.set)
    await manager.sync(2)
    assert_same(sink.weights, awkward_weights(1))
