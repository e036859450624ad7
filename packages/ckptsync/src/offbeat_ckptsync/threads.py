"""Blocking work beside an event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")


async def in_thread(work: Callable[[], _Result], *, name: str) -> _Result:
    """Run `work` in a daemon thread of its own and return its result.

    Unlike `asyncio.to_thread`, a call that hangs after its deadline delays neither other calls (no pool to fill) nor
    the end of the process (no join at exit). Cancelling stops the waiting, not the work.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def settle(result: _Result | None, error: BaseException | None) -> None:
        if done.done():
            return  # the waiter gave up
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        else:
            done.set_exception(error)

    def run() -> None:
        result: _Result | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 -- becomes the future's exception
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
