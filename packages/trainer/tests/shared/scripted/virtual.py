"""An event loop whose clock jumps: hours of waiting take no time, and the order of events is always the same."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from concurrent.futures import Executor

    from _typeshed import FileDescriptorLike

_Result = TypeVar("_Result")
_Args = TypeVarTuple("_Args")


class _JumpingSelector(selectors.BaseSelector):
    """Waits for nothing: where a real selector would sleep, the clock jumps instead."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = self._real.select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise RuntimeError(
                "every task waits for another one and no timer is set: this would hang for ever"
            )
        self.now_s += max(timeout, 0.0)
        return events

    def register(
        self, fileobj: FileDescriptorLike, events: int, data: object = None
    ) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing is left to do. Work for threads is done on the spot, in no time.

    Raises RuntimeError where a real loop would wait for ever: a deadlock is a failure, not a hang.
    """

    def __init__(self) -> None:
        """Start at second 0."""
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jumping.now_s

    def run_in_executor(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, executor: Executor | None, func: Callable[[*_Args], _Result], *args: *_Args
    ) -> asyncio.Future[_Result]:
        """Call `func` here and now."""
        del executor
        future: asyncio.Future[_Result] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is handed to whoever awaits the future
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[object, object, _Result]) -> _Result:
    """Run `main` to its end on a `VirtualLoop` of its own and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
