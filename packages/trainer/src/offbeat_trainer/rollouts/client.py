"""The driver's end of a process that calls what users wrote: started with the first call, started again when it dies."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from offbeat_trainer.rollouts.frames import DIED, LENGTH, Answer, Call, frame, read_answers
from offbeat_trainer.watch.watchdog import now_s

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_trainer.rollouts.frames import Setup

COMMAND = "from offbeat_trainer.rollouts.server import main; main()"
GRACE_S = 15.0
SECRETS = frozenset(
    {
        "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    }
)  # fmt: skip
"""What a run itself uses of the environment and no reward needs; the key of a judge stays."""


class CallProcess:
    """Calls functions over there. One event loop; nothing runs before the first call.

    `life` counts how often the process was started.
    """

    def __init__(
        self, setup: Setup, log: Path | None = None, *, command: str = COMMAND, whose: str = "rewards"
    ) -> None:
        """Serve the functions of `setup` by `command`; what they print goes to the end of `log`, or to where our errors go."""
        self.life = 0
        self._setup = setup
        self._log = log
        self._command = command
        self._whose = whose
        # Between two answers every worker may be at a call that takes as long as it may, and has its imports before it.
        self._silence_s = 2 * setup.timeout_s + 120
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._outgoing: list[Call] = []
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._started: list[asyncio.subprocess.Process] = []
        self._heard_s = 0.0

    @property
    def runs(self) -> bool:
        """Whether the process is there; the next call starts one that is not."""
        return self._process is not None

    async def call(self, path: str, arguments: dict[str, Any]) -> Answer:
        """Call the function at `path`; its failure is an answer, the end of the process over there is one, too."""
        await self._running()
        call = Call(number=next(self._numbers), path=path, arguments=arguments)
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        if not self._waiting:  # until now there was nothing to say
            self._heard_s = now_s()
        self._waiting[call.number] = answer
        if not self._outgoing:
            loop.call_soon(self._send)
        self._outgoing.append(call)
        try:
            return await answer
        finally:
            self._waiting.pop(call.number, None)

    def _send(self) -> None:
        """Send the calls of this turn of the event loop in one frame, except those that nobody waits for any more."""
        calls, self._outgoing = self._outgoing, []
        if self._process is None:  # it is gone: the reader has answered
            return
        assert self._process.stdin is not None
        self._process.stdin.write(frame([call for call in calls if call.number in self._waiting]))

    async def end(self) -> None:
        """Kill the process, whatever it does; calls under way are answered, and the next one starts another."""
        process, reader = self._process, self._reader
        if process is not None and reader is not None:
            _kill(process)
            await asyncio.wait([reader], timeout=GRACE_S)

    async def close(self) -> None:
        """End everything over there, whatever it does."""
        process, reader = self._process, self._reader
        self._process = self._reader = None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await process.wait()
            _kill(process)
        for each in self._started:  # those that were killed before, too: this is where they are waited for
            await each.wait()
        self._started.clear()
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None:
                self._process = await self._start()
                self._reader = asyncio.create_task(
                    self._read(self._process), name=f"answers of {self._whose}"
                )
            return self._process

    async def _start(self) -> asyncio.subprocess.Process:
        log = None if self._log is None else self._log.open("ab")
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={name: value for name, value in os.environ.items() if name not in SECRETS},  # noqa: TID251
                start_new_session=True,  # Ctrl-C is the run's, which then closes this
            )
        finally:
            if log is not None:
                log.close()
        self._started = [each for each in self._started if each.returncode is None] + [process]
        assert process.stdin is not None
        process.stdin.write(frame(self._setup))
        self._heard_s = now_s()
        self.life += 1
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        why = "it ended"
        try:
            while True:
                answers = await self._next(process)
                self._heard_s = now_s()
                for answer in answers:
                    waiting = self._waiting.get(answer.number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(answer)
        except TimeoutError:
            why = f"it gave no answer for {self._silence_s:g} s"
        except asyncio.IncompleteReadError:
            pass
        except pickle.UnpicklingError as error:
            why = f"it sent what is no answer: {error}"
        finally:
            _kill(process)
            if self._process is process:  # the next call starts another
                self._process = None
            for number, waiting in self._waiting.items():
                if not waiting.done():
                    detail = f"the process that calls {self._whose}: {why}; what it said is in {self._log or 'stderr'}"
                    waiting.set_result(Answer(number=number, failure=DIED, detail=detail))

    async def _next(self, process: asyncio.subprocess.Process) -> list[Answer]:
        """Return the answers of the next frame.

        Raises:
            IncompleteReadError: the process is gone.
            TimeoutError: calls are under way, and none was answered for too long.
        """
        stream = process.stdout
        assert stream is not None
        left_s = self._silence_s
        while True:
            try:
                async with asyncio.timeout(left_s):
                    head = await stream.readexactly(LENGTH.size)
            except TimeoutError:
                left_s = self._silence_s - (now_s() - self._heard_s if self._waiting else 0)
                if left_s <= 0:
                    raise
                continue
            (size,) = LENGTH.unpack(head)
            async with asyncio.timeout(self._silence_s):
                return read_answers(await stream.readexactly(size))


def _kill(process: asyncio.subprocess.Process) -> None:
    """End `process` and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
