"""The process that calls reward functions, driven over its pipes.

Functions run in worker processes, each in its main thread, where `signal.alarm` works; one that outlasts its limit or takes
its process down is replaced, and nobody else notices. Coroutine functions run in one event loop of their own. Workers are
forked from a process that has imported the functions and started no thread, so that the many are cheap.

A worker gets one call at a time, or as many quick ones as take `BATCH_S` together: to hand over a call costs as much as
dozens of those. A batch whose worker is lost is called again, one by one, so that each call has its own limit and answer.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import sys
import threading
import time
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pebble import ProcessExpired, ProcessPool

from offbeat_trainer.data.loading import load_object
from offbeat_trainer.rollouts.frames import (
    DIED,
    RAISED,
    READY,
    TIMED_OUT,
    Answer,
    over_there,
    plain,
    read_frame,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from offbeat_trainer.rollouts.frames import Call, Setup

FILES = (
    "OFFBEAT_REWARD_FUNCTIONS"  # for the process that workers are forked from: import paths, newline between
)


BATCH_S = 0.005


def call_each(path: str, arguments: Sequence[dict[str, Any]]) -> tuple[list[tuple[Any, str]], float]:
    """Return what each call of the function at `path` gives, or what it raised in words, and the seconds of one call."""
    outcomes: list[tuple[Any, str]] = []
    started_s = time.perf_counter()
    for own in arguments:
        try:
            outcomes.append((call_here(path, own), ""))
        except BaseException as error:  # noqa: BLE001 - whatever a user's function raises, SystemExit included
            outcomes.append((None, f"{type(error).__name__}: {error}"))
    return outcomes, max(1e-6, time.perf_counter() - started_s) / len(arguments)


def call_here(path: str, arguments: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever the function returns
    """Call the function at `path` in this process, which keeps what it has imported."""
    if path == READY:
        return None
    function: Any = load_object(path)
    value = function(**arguments)
    if inspect.isawaitable(
        value
    ):  # of a function that does not look like a coroutine's: an object's, or wrapped
        value = asyncio.run(_awaited(value))
    return plain(value)


async def _awaited(value: Awaitable[Any]) -> Any:  # noqa: ANN401 - whatever it gives
    return await value


class Server:
    """Takes calls in turn and answers each once."""

    def __init__(self, setup: Setup, answer: Callable[[Sequence[Answer]], None]) -> None:
        """Import the functions; workers start, all at once, with the first call that needs one, `READY` included."""
        self._setup = setup
        self._answer = answer
        sys.path += [folder for folder in setup.search if folder not in sys.path]
        functions = {path: load_object(path) for path in setup.paths}
        self._coroutines = {path: one for path, one in functions.items() if inspect.iscoroutinefunction(one)}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: ProcessPool | None = None
        self._turns = asyncio.Semaphore(setup.concurrency)
        self._call_s: dict[str, float] = {}  # what the last calls of each function took

    def take(self, calls: Sequence[Call]) -> None:
        """Begin `calls`; their answers come when they come."""
        for path, group in groupby(calls, key=lambda call: call.path):
            waiting = list(group)
            if path in self._coroutines:
                for call in waiting:
                    asyncio.run_coroutine_threadsafe(self._await(call), self._events())
            elif path == READY and self._coroutines.keys() >= set(self._setup.paths):
                self._answer([Answer(number=call.number) for call in waiting])
            else:
                at_once = max(1, int(BATCH_S / self._call_s.get(path, BATCH_S)))
                for start in range(0, len(waiting), at_once):
                    self._begin(waiting[start : start + at_once])

    def _begin(self, batch: Sequence[Call]) -> None:
        """Let a worker do the calls of `batch`, all of one function."""
        arguments = [call.arguments for call in batch]
        future = self._workers().schedule(
            call_each, args=[batch[0].path, arguments], timeout=self._setup.timeout_s
        )
        future.add_done_callback(lambda done: self._end(batch, done))

    def _end(self, batch: Sequence[Call], done: Any) -> None:  # noqa: ANN401 - pebble's future
        error = done.exception()
        if error is None:
            outcomes, self._call_s[batch[0].path] = done.result()
            self._answer(
                [
                    Answer(number=call.number, value=value, failure=RAISED if raised else "", detail=raised)
                    for call, (value, raised) in zip(batch, outcomes, strict=True)
                ]
            )
        elif len(batch) > 1:
            for call in batch:
                self._begin([call])
        elif isinstance(error, ProcessExpired):
            self._answer([Answer(number=batch[0].number, failure=DIED, detail=f"exit code {error.exitcode}")])
        else:
            self._answer([self._failed(batch[0], error, timed_out=isinstance(error, TimeoutError))])

    def close(self) -> None:
        """End the workers, whatever they do."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join(timeout=10)

    def _workers(self) -> ProcessPool:
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__, "offbeat_trainer.rollouts.imported"])
            os.environ[FILES] = "\n".join(self._setup.paths)  # noqa: TID251 - a preloaded module has no other word from us
            self._pool = ProcessPool(max_workers=self._setup.concurrency, context=context)
        return self._pool

    def _events(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
        return self._loop

    async def _await(self, call: Call) -> None:
        limit = asyncio.timeout(self._setup.timeout_s)
        try:
            async with self._turns, limit:
                value = plain(await self._coroutines[call.path](**call.arguments))
            self._answer([Answer(number=call.number, value=value)])
        except BaseException as error:  # noqa: BLE001 - whatever a user's function raises
            self._answer([self._failed(call, error, timed_out=limit.expired())])

    def _failed(self, call: Call, error: BaseException, *, timed_out: bool) -> Answer:
        if timed_out:
            detail = f"it took longer than {self._setup.timeout_s:g} s"
            return Answer(number=call.number, failure=TIMED_OUT, detail=detail)
        return Answer(number=call.number, failure=RAISED, detail=f"{type(error).__name__}: {error}")


def main() -> None:
    """Serve until the other end is gone. What functions print goes where errors go."""
    incoming, answer = over_there()
    setup = read_frame(incoming)
    if setup is None:
        return
    server = Server(setup, answer)
    try:
        while (calls := read_frame(incoming)) is not None:
            server.take(calls)
    finally:
        server.close()
        os._exit(0)  # a coroutine that never ends keeps nobody
