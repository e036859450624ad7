"""Real signals to this process."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from offbeat_recipes.run.terminal import BEAT_S, SIGNALS, StandingLoop, StopKeys
from offbeat_trainer.loops.session import StopRequest
from scripted import Recorder

DEADLINE_S = 600.0


async def press(number, until):
    """Send the signal to this process and let the loop handle it."""
    os.kill(os.getpid(), number)
    async with asyncio.timeout(DEADLINE_S):
        while not until():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0)


@pytest.mark.parametrize("number", SIGNALS)
async def test_the_first_asks_for_an_end_after_the_step_and_the_second_ends_at_once(number):
    stop, reporter = StopRequest(), Recorder()
    stop.listening = True
    trail = []

    async def run():
        with StopKeys(stop, reporter):
            await press(number, lambda: stop.requested)
            trail.append("asked")
            await press(number, lambda: False)
            trail.append("never here")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.create_task(run()), DEADLINE_S)
    assert trail == ["asked"]
    assert [name for name, _ in reporter.phases] == ["stopping"]
    assert "Ctrl-C again" in reporter.phases[0][1]


@pytest.mark.parametrize("number", SIGNALS)
async def test_before_the_loop_listens_the_first_ends_the_run(number):
    stop, reporter = StopRequest(), Recorder()

    async def run():
        with StopKeys(stop, reporter):
            await press(number, lambda: False)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.create_task(run()), DEADLINE_S)
    assert stop.requested
    assert reporter.phases == [("stopping", "at once: no step has begun")]


async def test_afterwards_the_signals_are_pythons_own_again():
    pythons_own = [signal.default_int_handler, signal.SIG_DFL]
    with StopKeys(StopRequest(), Recorder()):
        assert not {signal.getsignal(number) for number in SIGNALS} & set(pythons_own)
    assert [signal.getsignal(number) for number in SIGNALS] == pythons_own


async def test_a_terminal_that_hangs_up_ends_nothing_and_what_is_started_then_inherits_that():
    ask = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"]
    before = signal.getsignal(signal.SIGHUP)
    with StopKeys(StopRequest(), Recorder()):
        os.kill(os.getpid(), signal.SIGHUP)
        told = await asyncio.to_thread(subprocess.run, ask, capture_output=True, text=True, check=True)
        assert told.stdout == "True\n"
    assert signal.getsignal(signal.SIGHUP) is before


STANDING = """
import asyncio, sys, time
from offbeat_recipes.run.terminal import StandingLoop, StopKeys
from offbeat_trainer.loops.session import StopRequest
from scripted import Recorder

async def run():
    with StopKeys(StopRequest(), Recorder()):
        loop, began = asyncio.get_running_loop(), time.monotonic()
        started = loop.time()
        print("ready", flush=True)
        async with asyncio.timeout(float(sys.argv[1])):
            while time.monotonic() - began < float(sys.argv[2]):
                await asyncio.sleep(0.05)
        print(loop.time() - started, flush=True)

with asyncio.Runner(loop_factory=StandingLoop) as runner:
    runner.run(run())
"""


@pytest.mark.spawns
@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGTSTP, pytest.param(signal.SIGSTOP, marks=pytest.mark.deep)])
def test_no_deadline_runs_out_while_the_process_is_stopped(stop):
    limit_s, away_s = 15.0, 20.0
    process = subprocess.Popen(
        [sys.executable, "-c", STANDING, str(limit_s), str(away_s)],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # of this session: one of its own would be orphaned, and Ctrl-Z is not for those
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(stop)
    time.sleep(away_s)
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert float(said) < limit_s


def test_the_clock_of_a_loop_leaves_out_the_time_away(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("asyncio.base_events.time.monotonic", lambda: now[0])
    loop = StandingLoop()
    try:
        assert loop.time() == 100.0
        now[0] += 3600 + BEAT_S  # stopped for an hour, at most one beat after the clock was seen
        loop._came_back()
        assert loop.time() == 100.0 + BEAT_S
        now[0] += 5
        assert loop.time() == 105.0 + BEAT_S
    finally:
        loop.close()
