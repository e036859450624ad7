from __future__ import annotations

import asyncio
import os
import sys

import pytest

from offbeat_ckptsync.toolkit.threads import BusyClock, in_thread, num_movers, short_turns


def test_a_clock_counts_time_in_which_anybody_works_once(monkeypatch):
    times = iter([1.0, 4.0, 6.0, 6.5])
    monkeypatch.setattr("offbeat_ckptsync.toolkit.threads.time.perf_counter", lambda: next(times))
    clock = BusyClock()
    with clock, clock:  # as another thread would
        pass
    assert clock.seconds == pytest.approx(3.0)
    with clock:
        pass
    assert clock.seconds == pytest.approx(3.5)


def test_movers_are_as_many_as_the_threads_cores_and_no_more_than_four(monkeypatch):
    for cores, movers in [(1, 1), (2, 2), (64, 4)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, n=cores: set(range(n)))
        assert num_movers() == movers


def test_turns_are_short_while_anybody_asks_and_as_before_afterwards():
    before = sys.getswitchinterval()
    with short_turns:
        with short_turns:
            assert sys.getswitchinterval() == pytest.approx(0.001)
        assert sys.getswitchinterval() == pytest.approx(0.001), "somebody is still in there"
    assert sys.getswitchinterval() == before


async def test_whatever_is_raised_in_a_thread_reaches_who_waits_for_it():
    for work in (lambda: next(iter(())), lambda: {}["key"]):
        async with asyncio.timeout(60):
            with pytest.raises((RuntimeError, KeyError), match=r"StopIteration|key"):
                await in_thread(work, name="work")
