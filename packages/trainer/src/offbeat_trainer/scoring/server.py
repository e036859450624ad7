"""The process that calls reward functions, driven over its pipes.

Functions run in worker processes, each in its main thread, where `signal.alarm` works; one that outlasts its limit or takes
its process down is replaced, and nobody else notices. Coroutine functions run in one event loop of their own. Workers are
forked from a process that has imported the functions and started no thread, so that the many are cheap.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

from pebble import ProcessExpired, ProcessPool

from offbeat_trainer.loading import load_object
from offbeat_trainer.scoring.frames import DIED, RAISED, READY, TIMED_OUT, Answer, over_there, read_frame

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from offbeat_trainer.scoring.frames import Call, Setup

FILES = (
    "OFFBEAT_REWARD_FUNCTIONS"  # for the process that workers are forked from: import paths, newline between
)


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


def plain(value: Any) -> Any:  # noqa: ANN401 - as it came
    """Return `value` with its numbers as Python's: what goes back must not need the function's libraries."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):  # arrays and tensors, of one element and of many
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in cast("Sequence[object]", value)]
    try:
        return float(value)
    except (TypeError, ValueError):
        return repr(value)  # said in the refusal


class Server:
    """Takes calls in turn and answers each once."""

    def __init__(self, setup: Setup, answer: Callable[[Answer], None]) -> None:
        """Import the functions; workers start, all at once, with the first call that needs one, `READY` included."""
        self._setup = setup
        self._answer = answer
        sys.path += [folder for folder in setup.search if folder not in sys.path]
        functions = {path: load_object(path) for path in setup.paths}
        self._coroutines = {path: one for path, one in functions.items() if inspect.iscoroutinefunction(one)}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: ProcessPool | None = None
        self._turns = asyncio.Semaphore(setup.concurrency)

    def take(self, call: Call) -> None:
        """Begin `call`; its answer comes when it comes."""
        if call.path in self._coroutines:
            asyncio.run_coroutine_threadsafe(self._await(call), self._events())
            return
        if call.path == READY and self._coroutines.keys() >= set(self._setup.paths):
            self._answer(Answer(number=call.number))
            return
        future = self._workers().schedule(
            call_here, args=[call.path, call.arguments], timeout=self._setup.timeout_s
        )
        future.add_done_callback(lambda done: self._answer(self._outcome(call, done)))

    def close(self) -> None:
        """End the workers, whatever they do."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join(timeout=10)

    def _workers(self) -> ProcessPool:
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__, "offbeat_trainer.scoring.imported"])
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
            self._answer(Answer(number=call.number, value=value))
        except BaseException as error:  # noqa: BLE001 - whatever a user's function raises
            self._answer(self._failed(call, error, timed_out=limit.expired()))

    def _outcome(self, call: Call, done: Any) -> Answer:  # noqa: ANN401 - pebble's future
        error = done.exception()
        if error is None:
            return Answer(number=call.number, value=done.result())
        if isinstance(error, ProcessExpired):
            return Answer(number=call.number, failure=DIED, detail=f"exit code {error.exitcode}")
        # The pool's own time-out says so in its first word; a function's is one that it raised.
        timed_out = isinstance(error, TimeoutError) and error.args[:1] == ("Task timeout",)
        return self._failed(call, error, timed_out=timed_out)

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
        while (call := read_frame(incoming)) is not None:
            server.take(call)
    finally:
        server.close()
        os._exit(0)  # a coroutine that never ends keeps nobody
