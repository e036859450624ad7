"""A death is noticed by whoever watches, not only by whoever calls next."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

_Result = TypeVar("_Result")


async def guarded(
    work: Coroutine[Any, Any, _Result], watch: Coroutine[Any, Any, object], *, name: str
) -> _Result:
    """Return what `work` returns or raises; if `watch` raises first, end `work`, wait for that, and raise it.

    Where both fail, `watch` tells: what `work` saw of a death may be no more than a broken connection.
    """
    working = asyncio.create_task(work, name=name)
    watching = asyncio.create_task(watch, name=f"watch over {name}")
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done() and (not working.done() or working.exception() is not None):
            watching.result()
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
