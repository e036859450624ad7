"""The buffer's account of every group, against a model that knows only sets."""

import asyncio
import gc
import weakref

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offbeat_trainer.config import AsyncConfig, Order
from offbeat_trainer.data.types import Group, Prompt, version_of
from offbeat_trainer.errors import TrainerError
from offbeat_trainer.loops.buffer import GroupBuffer, StalenessGate
from offbeat_trainer.loops.events import MemoryJournal, Recovered, recover
from offbeat_trainer.loops.schedule import Schedule
from scripted import run_virtual

STEPS = 100_000


def make_group(index):
    return Group(prompt=Prompt(uid=str(index), text="", token_ids=(1,)), trajectories=())


class WatchedGroup(Group):
    """A group without slots, which takes weak references."""


def make_buffer(journal=None, *, order=Order.OLDEST_VERSION, groups_per_step=2, on_drop=None, **mode):
    config = AsyncConfig(order=order, **mode)
    gate = StalenessGate.from_config(config, groups_per_step=groups_per_step, num_steps=STEPS)
    return GroupBuffer(gate, order, MemoryJournal() if journal is None else journal, on_drop=on_drop)


@pytest.mark.parametrize("order", Order)
def test_a_replayed_step_leaves_none_of_its_groups_behind(order):
    """A schedule takes them by index: a queue that nobody looks at must not keep what was trained."""

    async def replay():
        gate = StalenessGate.from_config(AsyncConfig(order=order), groups_per_step=2, num_steps=STEPS)
        schedule = Schedule(taken={step: (2 * step, 2 * step + 1) for step in range(30)})
        buffer = GroupBuffer(gate, order, MemoryJournal(), replay=schedule)
        groups = []
        for step in range(30):
            for index in schedule.taken[step]:
                group = WatchedGroup(prompt=Prompt(uid=str(index), text="", token_ids=(1,)), trajectories=())
                groups.append(weakref.ref(group))
                buffer.issue(index, str(index), 1)
                buffer.finish(index, group)
            assert [entry.index for entry in await buffer.take(step)] == [*schedule.taken[step]]
        assert buffer.pending == 0
        del group
        gc.collect()
        return [index for index, group in enumerate(groups) if group() is not None]

    assert run_virtual(replay()) == []


def test_in_order_a_step_waits_for_what_an_earlier_process_left_unfinished():
    """Whole groups that are taken back must not be trained before those of lower index, which are still to be begun again."""

    async def go_on():
        gate = StalenessGate.from_config(AsyncConfig(), groups_per_step=2, num_steps=STEPS)
        recovered = Recovered(start=0, next_index=4, gaps=[0, 2])
        buffer = GroupBuffer(gate, Order.FIRST_IN, MemoryJournal(), recovered=recovered)
        for index in (1, 3):
            buffer.restore(index, 1, make_group(index))
        taken = asyncio.ensure_future(buffer.take(0))
        for index in (0, 2):
            await asyncio.sleep(0)
            buffer.issue(index, str(index), 1)
            buffer.finish(index, make_group(index))
        return [entry.index for entry in await taken]

    assert run_virtual(go_on()) == [0, 1]


class Account(RuleBasedStateMachine):
    """Issues, finishes, drops, flips and takes at random, and counts by hand."""

    @initialize(
        order=st.sampled_from(Order),
        staleness=st.integers(0, 3),
        groups_per_step=st.integers(1, 3),
        over_sampling=st.sampled_from([0.0, 0.0, 0.5]),
    )
    def begin(self, order, staleness, groups_per_step, over_sampling):
        self.journal = MemoryJournal()
        self.heard = []
        self.buffer = make_buffer(
            self.journal, order=order, groups_per_step=groups_per_step, max_staleness=staleness,
            over_sampling=over_sampling, on_drop=self.heard.append,
        )  # fmt: skip
        self.running, self.ready, self.dropped, self.consumed = set(), set(), set(), []
        self.versions = {}

    @property
    def step(self):
        return self.buffer.step

    @precondition(lambda self: self.buffer.room() > 0)
    @rule()
    def issue(self):
        index = len(self.versions)
        self.buffer.issue(index, str(index), self.buffer.served)
        self.versions[index] = self.buffer.served
        self.running.add(index)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        index = data.draw(st.sampled_from(sorted(self.running)))
        self.buffer.finish(index, make_group(index))
        self.running.remove(index)
        self.ready.add(index)

    @precondition(lambda self: self.running or self.ready)
    @rule(data=st.data())
    def drop(self, data):
        index = data.draw(st.sampled_from(sorted(self.running | self.ready)))
        self.buffer.drop(index, "failed")
        self.running.discard(index)
        self.ready.discard(index)
        self.dropped.add(index)

    @precondition(lambda self: self.buffer.served < version_of(self.step))
    @rule()
    def flip(self):
        self.buffer.serve(version_of(self.step))

    @rule()
    def take_if_ready(self):
        async def take():
            async with asyncio.timeout(1):
                return await self.buffer.take(self.step)

        step = self.step
        try:
            entries = run_virtual(take())
        except TimeoutError:
            everything_done = not self.running and len(self.ready) >= self.buffer.gate.groups_per_step
            assert not everything_done, "with all groups there, a step must be able to go on"
            return
        taken = [entry.index for entry in entries]
        assert taken == sorted(taken)
        assert len(taken) == self.buffer.gate.groups_per_step
        assert set(taken) <= self.ready
        assert all(entry.group.prompt.uid == str(entry.index) for entry in entries)
        for index in taken:
            assert version_of(step) - self.versions[index] <= self.buffer.gate.max_staleness
        self.ready -= set(taken)
        self.consumed += taken
        late = set(self.heard) - self.dropped
        assert not late or self.buffer.gate.drops
        self.dropped |= late
        self.running -= late
        self.ready -= late

    @invariant()
    def the_account_holds(self):
        if not hasattr(self, "buffer"):
            return
        buffer = self.buffer
        assert (
            buffer.issued == len(self.versions) == buffer.consumed + buffer.pending + buffer.dropped.total()
        )
        assert (buffer.running, buffer.ready_groups) == (len(self.running), len(self.ready))
        assert (buffer.consumed, buffer.dropped.total()) == (len(self.consumed), len(self.dropped))
        assert sorted(self.heard) == sorted(self.dropped)
        assert len(set(self.consumed)) == len(self.consumed)
        assert buffer.pending <= buffer.gate.width * (buffer.gate.max_staleness + 1)

    @invariant()
    def the_journal_tells_the_same(self):
        if not hasattr(self, "buffer"):
            return
        found = recover(self.journal.events(), self.step, self.buffer.gate.groups_per_step)
        assert set(found.finished) == self.ready
        assert set(found.gaps) == self.running
        assert set(found.dropped) == self.dropped
        assert found.consumed == len(self.consumed)


TestAccount = Account.TestCase


async def test_whoever_waits_is_woken_by_the_change_that_matters_and_no_other(monkeypatch):
    buffer = make_buffer(max_staleness=0)
    asked = []
    right = buffer._is_ready
    monkeypatch.setattr(buffer, "_is_ready", lambda step: asked.append(step) or right(step))
    taking = asyncio.create_task(buffer.take(0))
    await asyncio.sleep(0)
    for index in range(2):
        buffer.issue(index, str(index), 1)
    buffer.finish(0, make_group(0))
    await asyncio.sleep(0.05)
    num_asked = len(asked)
    assert num_asked == 4, "asked at its start and after each of three changes; nobody polls"
    assert not taking.done()
    buffer.finish(1, make_group(1))
    assert [entry.index for entry in await taking] == [0, 1]


async def test_an_error_reaches_those_who_wait_and_those_who_come_later():
    buffer = make_buffer()
    taking = asyncio.create_task(buffer.take(0))
    await asyncio.sleep(0)
    buffer.fail(ZeroDivisionError("a reward"))
    for waiting in (taking, buffer.take(0), buffer.settled(), buffer.leave()):
        with pytest.raises(ZeroDivisionError, match="a reward"):
            await waiting


async def test_what_was_dropped_may_still_finish_and_changes_nothing():
    buffer = make_buffer()
    buffer.issue(0, "0", 1)
    buffer.drop(0, "failed")
    buffer.finish(0, make_group(0))
    buffer.drop(0, "failed")
    assert (buffer.issued, buffer.pending, buffer.dropped.total()) == (1, 0, 1)


async def test_the_orders():
    def filled(order):
        buffer = make_buffer(order=order, max_staleness=3, groups_per_step=1)
        for index in range(4):
            buffer.issue(index, str(index), 1)
        for index in (2, 3, 1):  # the first is still under way
            buffer.finish(index, make_group(index))
        return buffer

    assert [entry.index for entry in await filled(Order.OLDEST_VERSION).take(0)] == [1]
    assert [entry.index for entry in await filled(Order.LONGEST_WAITING).take(0)] in ([2], [3], [1])
    first_in = filled(Order.FIRST_IN)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await first_in.take(0)
    first_in.finish(0, make_group(0))
    assert [entry.index for entry in await first_in.take(0)] == [0]


def test_longest_waiting_goes_by_the_time_of_finishing():
    async def main():
        buffer = make_buffer(order=Order.LONGEST_WAITING, max_staleness=3, groups_per_step=1)
        for index in range(4):
            buffer.issue(index, str(index), 1)
        for index in (2, 3, 1):
            buffer.finish(index, make_group(index))
            await asyncio.sleep(1)
        taken = []
        for step in range(3):
            buffer.serve(version_of(step))
            taken += [entry.index for entry in await buffer.take(step)]
            if step == 0:
                buffer.finish(0, make_group(0))
        return taken

    assert run_virtual(main()) == [2, 3, 1]


async def test_steps_are_taken_in_turn():
    with pytest.raises(AssertionError, match="0 is next, not 1"):
        await make_buffer().take(1)


async def test_what_the_gate_should_have_prevented_is_an_error_and_not_a_batch():
    buffer = make_buffer(max_staleness=1, groups_per_step=1)
    for index in range(2):
        buffer.issue(index, str(index), 1)
    buffer.gate = StalenessGate(max_staleness=0, groups_per_step=1, num_steps=STEPS)
    buffer.finish(0, make_group(0))
    buffer._entries[1].last_step = 0
    buffer._outstanding.clear()
    buffer._outstanding[0] = 1
    buffer._entries[0].last_step = 0
    buffer._outstanding[0] = 2
    buffer.script = {0: (0,)}
    with pytest.raises(TrainerError, match="can no longer be trained"):
        await buffer.take(0)


def test_ten_thousand_groups_in_flight_cost_little_each():
    """Not timed: the number of times anything is looked at must not grow with what is pending."""
    buffer = make_buffer(order=Order.FIRST_IN, max_staleness=9999, groups_per_step=1)
    looks = []

    async def main():
        for index in range(10_000):
            buffer.issue(index, str(index), 1)
        first = buffer._first
        buffer._first = lambda: looks.append(1) or first()
        taking = asyncio.create_task(buffer.take(0))
        await asyncio.sleep(0)
        for index in range(9_999, -1, -1):
            buffer.finish(index, make_group(index))
        await taking

    run_virtual(main())
    assert len(looks) < 11_000
    assert buffer.pending == 9_999
