"""How long the process over there may say nothing, on a clock that jumps: its pipe is real, what answers is this file."""

import asyncio
import os
import pickle
import signal
import time
from types import SimpleNamespace

import pytest

from offbeat_trainer.rollouts.client import CallProcess
from offbeat_trainer.rollouts.frames import DIED, LENGTH, READY, Answer, Setup, frame
from scripted import run_virtual

NOBODY = 2**31 - 2  # a process id that Linux gives to no one


class Answering(CallProcess):
    """Answers call n after `after_s[n]`; None is never."""

    def __init__(self, *after_s):
        super().__init__(Setup(paths=(), search=(), concurrency=1, timeout_s=60.0))
        self.after_s = after_s
        self.numbers = iter(range(len(after_s)))
        self.frames = 0

    def value(self, number):
        return number

    async def _start(self):
        self.life += 1
        stream = asyncio.StreamReader()

        def write(framed):
            assert LENGTH.unpack(framed[: LENGTH.size]) == (len(framed) - LENGTH.size,)
            self.frames += 1
            for call in pickle.loads(framed[LENGTH.size :]):
                number = next(self.numbers)
                assert call.number == number
                if self.after_s[number] is not None:
                    answer = frame([Answer(number=number, value=self.value(number))])
                    asyncio.get_running_loop().call_later(self.after_s[number], stream.feed_data, answer)

        return SimpleNamespace(stdin=SimpleNamespace(write=write), stdout=stream, pid=NOBODY)


def test_calls_of_one_turn_go_in_one_frame_without_those_that_nobody_waits_for():
    async def go():
        process = Answering(0.0, 1.0, 2.0, 0.0)
        await process.call(READY, {})
        calls = [asyncio.create_task(process.call(READY, {})) for _ in range(3)]
        await asyncio.sleep(0)
        calls[2].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return process.frames, [one.value for one in answers[:2]], answers[2]

    frames, values, cancelled = run_virtual(go())
    assert (frames, values) == (2, [1, 2])
    assert isinstance(cancelled, asyncio.CancelledError)


class Attack:
    """What runs code where it is read: `os.mkdir(path)`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_an_answer_that_would_run_code_here_is_none(tmp_path):
    class Attacking(Answering):
        def value(self, number):
            return Attack(str(tmp_path / "there"))

    answer = run_virtual(Attacking(0.0).call(READY, {}))
    assert answer.failure == DIED
    assert "it sent what is no answer: an answer may not hold posix.mkdir" in answer.detail
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("idle_s", [0, 1, 120, 200, 239, 10_000])
def test_who_had_nothing_to_do_is_not_blamed_for_having_said_nothing(idle_s):
    async def go():
        process = Answering(0.0, 60.0)  # the second takes as long as it may
        assert (await process.call(READY, {})).value == 0
        await asyncio.sleep(idle_s)
        return await process.call(READY, {}), process.life

    answer, lives = run_virtual(go())
    assert (answer.failure, answer.value, lives) == ("", 1, 1)


def test_who_answers_nothing_for_long_is_given_up_and_that_is_when_it_was_asked():
    async def go():
        process = Answering(0.0, None)
        await process.call(READY, {})
        await asyncio.sleep(200)
        asked_s = asyncio.get_running_loop().time()
        answer = await process.call(READY, {})
        return answer, asyncio.get_running_loop().time() - asked_s

    answer, waited_s = run_virtual(go())
    assert answer.failure == DIED
    assert "it gave no answer for 240 s" in answer.detail
    assert 240 <= waited_s < 241


@pytest.mark.spawns
def test_who_was_killed_before_is_waited_for_when_all_is_closed(monkeypatch):
    wait = os.waitpid

    def slowly(pid, options):
        time.sleep(0.2 if options == 0 else 0)  # as on a machine that has other things to do
        return wait(pid, options)

    async def go():
        process = CallProcess(Setup(paths=(), search=(), concurrency=1, timeout_s=60.0))
        await process.call(READY, {})
        started = list(process._started)
        await process.end()
        await process.close()
        return [each.returncode for each in started]

    monkeypatch.setattr(os, "waitpid", slowly)
    assert asyncio.run(go()) == [-signal.SIGKILL]
