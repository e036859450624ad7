"""A run without a loop, held open for its caller: `with Trainer(..).session() as session`."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

from offbeat_recipes.errors import RunFailed
from offbeat_recipes.run.context import Caller
from offbeat_trainer.loops.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from offbeat_trainer import Task

P = ParamSpec("P")
T = TypeVar("T")


class Handover:
    """Where a run in a thread of its own gives its session to its caller, and learns that it is no longer needed."""

    def __init__(self) -> None:
        self.session: Future[Session] = Future()
        self.is_interrupted = False
        self._closed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_over = False

    async def hand_over(self, session: Session) -> None:
        """Give `session` to the caller, and return once it is closed; calls that are under way then end before."""
        self._loop = asyncio.get_running_loop()
        self.session.set_result(session)
        try:
            await self._closed.wait()
        finally:  # a call of Ray's after its end would start another Ray
            self._is_over = True
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Have `call` done in the run's thread."""
        assert self._loop is not None, "the session is handed over first"
        return asyncio.run_coroutine_threadsafe(self._kept(call), self._loop)

    async def _kept(self, call: Coroutine[Any, Any, T]) -> T:
        if self._is_over:
            call.close()
            raise asyncio.CancelledError
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._calls.add(task)
        try:
            return await call
        finally:
            self._calls.discard(task)

    def close(self, *, interrupted: bool) -> None:
        """Let the run end; safe to call once it has."""
        self.is_interrupted = interrupted
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._closed.set)


def blocking(
    method: Callable[Concatenate[Session, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[LiveSession, P], T]:
    """Return `method` of a session as one that returns when it is done."""

    @wraps(method)
    def call(self: LiveSession, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.wait_for(method(self.session, *args, **kwargs))

    return call


class LiveSession:
    """The verbs of a run, for a loop of one's own; see `offbeat_trainer.loops.session.Session`.

    A context manager: everything that a run has is started when it is entered, and the weights of `steps` are served then; it ends with
    the block, and a block that ends well leaves the model in `<run>/final`. Calls return when they are done, and several threads
    may make them. What goes wrong in a call is raised by it, as the package's own error, and the session stays usable; what ends the run,
    say a rank that dies, is raised as `RunFailed` by the call under way.
    """

    sample = blocking(Session.sample)
    batch = blocking(Session.batch)
    train = blocking(Session.train)
    step = blocking(Session.step)
    publish = blocking(Session.publish)
    logprobs = blocking(Session.logprobs)
    save = blocking(Session.save)
    load = blocking(Session.load)

    def __init__(self, run: Callable[[Handover, Caller], int], folder: Path) -> None:
        """`run` drives a run in `folder` that gives its session to a `Handover`, and returns the exit code."""
        self.folder = folder
        self._run = run
        self._caller = Caller()
        self._handover = Handover()
        self._ended: Future[int] = Future()

    @property
    def task(self) -> Task:
        """Where prompts come from: `task.prompts(step, count)`."""
        return self.session.task

    @property
    def steps(self) -> int:
        """How many optimizer steps were made, those before a resume included."""
        return self.session.steps

    @property
    def version(self) -> int:
        """Which weights the replicas serve."""
        return self.session.version

    @property
    def session(self) -> Session:
        """The session itself, whose methods are coroutines of the run's own event loop."""
        if not self._handover.session.done():
            raise RunFailed(
                "the session is not open; use it as `with Trainer(..).session() as session:`", self.folder
            )
        return self._handover.session.result()

    def __enter__(self) -> Self:
        def drive() -> None:
            try:
                self._ended.set_result(self._run(self._handover, self._caller))
            except BaseException as error:  # noqa: BLE001 raised where it is waited for
                self._ended.set_exception(error)

        self._thread = threading.Thread(target=drive, name="offbeat session")
        self._thread.start()
        try:
            _wait_for_one(self._handover.session, self._ended)
            if self._ended.done():
                self._raise_end()
        except BaseException:
            self._finish(interrupted=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = self._finish(interrupted=error is not None)
        if error is None and code:
            self._raise_end()

    def _finish(self, *, interrupted: bool) -> int:
        while self._thread.is_alive():  # also what is still starting learns of it
            self._handover.close(interrupted=interrupted)
            self._thread.join(0.2)
        return 1 if self._ended.exception() else self._ended.result()

    def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine of the session returns, done in the run's thread; raise what ends the run meanwhile."""
        if self._ended.done():
            call.close()
            self._raise_end()
        future = self._handover.submit(call)
        _wait_for_one(future, self._ended)
        if self._ended.done() and (not future.done() or future.cancelled()):
            self._raise_end()
        try:
            return future.result()
        except CancelledError:  # the run is ending, and says why in a moment
            self._ended.result()
            self._raise_end()

    def _raise_end(self) -> NoReturn:
        self._ended.result()  # what the plan refuses, or nobody foresaw
        raise RunFailed(self._caller.error or "the session has ended", self.folder)


def _wait_for_one(*futures: Future[Any]) -> None:
    wait(futures, return_when=FIRST_COMPLETED)
