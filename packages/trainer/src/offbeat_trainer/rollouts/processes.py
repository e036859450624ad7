"""Environments in processes of their own: they can neither block the run nor end it, and what hangs can be ended.

Those with coroutine functions share one process. Others are spread over `concurrency` processes, each of which does one thing at a
time; one that does not answer in time is ended with its process, and what else lived there begins anew without being blamed.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from offbeat_trainer.errors import EnvironmentFailed
from offbeat_trainer.rollouts.client import CallProcess
from offbeat_trainer.rollouts.frames import LOST, RAISED, TIMED_OUT, Answer, Setup

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from offbeat_trainer.config import EnvironmentConfig
    from offbeat_trainer.data.types import Prompt
    from offbeat_trainer.rollouts.environment import Action, Feedback, Observation

COMMAND = "from offbeat_trainer.rollouts.worker import main; main()"


@dataclass(slots=True, kw_only=True, eq=False)
class _Home:
    """One process, and the environments in it. `turn` is held by whose call runs, unless calls run side by side."""

    process: CallProcess
    num_instances: int = 0
    turn: asyncio.Lock | None = None
    looked: asyncio.Lock = field(default_factory=asyncio.Lock)
    ready: int = -1  # the life of the process that has imported the environment


class EnvironmentProcesses:
    """Makes environments that live elsewhere. One event loop; nothing runs before `start` or the first call."""

    def __init__(self, config: EnvironmentConfig, log: Path | None = None) -> None:
        """Make those of `config.path`; what they print goes to the end of `log`, or to where our errors go."""
        self._config = config
        self._setup = Setup(
            paths=(config.path,),
            search=tuple(sys.path),
            concurrency=1,
            timeout_s=config.timeout_s,
            args=config.args,
        )
        self._log = log
        self._homes: list[_Home] = []
        self._numbers = itertools.count()
        self._first = asyncio.Lock()
        self._calls: set[asyncio.Task[Answer]] = set()
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Start the processes, for which the first `reset` would wait; what this returns is done once they take calls.

        What keeps them from starting is said by every call that meets it.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start of the environments")
        return self._starting

    async def _start(self) -> None:
        with suppress(EnvironmentFailed):
            await self.find_home()
            await asyncio.gather(*map(self._look, self._homes))

    def make(self) -> RemoteEnvironment:
        """Return an environment; it is made where it will live, with its `reset`."""
        return RemoteEnvironment(self, next(self._numbers))

    async def close(self) -> None:
        """End all processes."""
        starting = [] if self._starting is None else [self._starting]
        under_way: list[asyncio.Task[Any]] = [*self._calls, *starting]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        homes, self._homes = self._homes, []
        await asyncio.gather(*(home.process.close() for home in homes))

    async def find_home(self) -> _Home:
        """Return the process that a new environment is to live in."""
        async with self._first:
            if not self._homes:
                first = self._new_home()
                try:
                    coroutines = await self._look(first)
                except BaseException:  # or nobody would end it
                    await first.process.close()
                    raise
                others = [] if coroutines else [self._new_home() for _ in range(self._config.concurrency - 1)]
                for home in () if coroutines else (first, *others):
                    home.turn = asyncio.Lock()
                self._homes = [first, *others]
        return min(self._homes, key=lambda home: home.num_instances)

    def _new_home(self) -> _Home:
        process = CallProcess(self._setup, self._log, command=COMMAND, whose="environments")
        return _Home(process=process)

    async def call(self, home: _Home, method: str, instance: int, given: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """Return what `method` of an environment in `home` returns.

        Raises:
            EnvironmentFailed: it raised, took too long, or took its process down, as another of that process may have.
        """
        arguments = {"instance": instance, "given": given}
        # A call that nobody waits for any more goes on over there: until it is over, the next one must not begin.
        answer = await asyncio.shield(self._spawn(self._in_turn(home, method, arguments)))
        if answer.failure:
            innocent = answer.failure == LOST
            raise EnvironmentFailed(
                answer.failure, f"`{method}` {answer.failure}: {answer.detail}", innocent=innocent
            )
        return answer.value

    def forget(self, home: _Home, instance: int) -> None:
        """Close an environment when its home has time for that; nobody waits for it."""
        if home.process.runs:
            self._spawn(self._in_turn(home, "close", {"instance": instance}))

    def _spawn(self, work: Coroutine[object, object, Answer]) -> asyncio.Task[Answer]:
        task = asyncio.create_task(work, name="a call of an environment")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _in_turn(self, home: _Home, method: str, arguments: dict[str, Any]) -> Answer:
        async with home.turn or nullcontext():
            try:
                await self._look(home)
            except EnvironmentFailed as error:
                return Answer(number=-1, failure=RAISED, detail=str(error))
            call = home.process.call if home.turn is None else partial(self._within_limit, home)
            return await call(method, arguments)

    async def _within_limit(self, home: _Home, method: str, arguments: dict[str, Any]) -> Answer:
        timeout_s = self._config.timeout_s
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await home.process.call(method, arguments)
        except TimeoutError:
            if not limit.expired():
                raise
            await home.process.end()
            return Answer(
                number=-1,
                failure=TIMED_OUT,
                detail=f"it took longer than {timeout_s:g} s (environment.timeout_s)",
            )

    async def _look(self, home: _Home) -> object:
        """Let a process that has begun import the environment, which no call's limit counts; return what it says."""
        async with home.looked:
            if home.process.runs and home.ready == home.process.life:
                return None
            answer = await home.process.call("look", {})
            if answer.failure:
                raise EnvironmentFailed(RAISED, f"{self._config.path} cannot be made: {answer.detail}")
            home.ready = home.process.life
            return answer.value


class RemoteEnvironment:
    """Satisfies `Environment` with one that lives in another process."""

    def __init__(self, processes: EnvironmentProcesses, number: int) -> None:
        """See `EnvironmentProcesses.make`."""
        self._processes = processes
        self._number = number
        self._home: _Home | None = None

    async def reset(self, prompt: Prompt, seed: int) -> Observation | Feedback:
        """See `Environment.reset`."""
        self._home = await self._processes.find_home()
        self._home.num_instances += 1
        return await self._processes.call(self._home, "reset", self._number, (prompt, seed))

    async def step(self, action: Action) -> Feedback:
        """See `Environment.step`."""
        assert self._home is not None, "`reset` comes first"
        return await self._processes.call(self._home, "step", self._number, (action,))

    async def close(self) -> None:
        """Have it closed and forgotten over there."""
        home, self._home = self._home, None
        if home is not None:
            home.num_instances -= 1
            self._processes.forget(home, self._number)
