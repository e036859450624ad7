"""Real signals to this process."""

import asyncio
import os
import signal

import pytest

from offbeat_recipes.run.interrupts import SIGNALS, StopKeys
from offbeat_trainer.stream.parts import StopRequest
from offbeat_trainer.testing import Recorder

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
    assert reporter.phases == []


async def test_afterwards_the_signals_are_pythons_own_again():
    pythons_own = [signal.default_int_handler, signal.SIG_DFL]
    with StopKeys(StopRequest(), Recorder()):
        assert not {signal.getsignal(number) for number in SIGNALS} & set(pythons_own)
    assert [signal.getsignal(number) for number in SIGNALS] == pythons_own
