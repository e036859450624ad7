"""Waiting for several at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from offbeat_ckptsync.errors import DigestError, SyncError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

_Result = TypeVar("_Result")
_SETTLE_S = 0.25


async def all_of(
    work: Mapping[str, Coroutine[object, object, _Result]],
    limit_s: float,
    *,
    where: str,
    on_silent: Callable[[list[str], bool], bool] = lambda names, too_late: False,
) -> dict[str, _Result]:
    """Await all of `work` within `limit_s`; the first failure ends the waiting.

    The error, which begins with `where`, names everyone that failed within a moment of the first: when one side dies its
    peers fail too, and which of them noticed first says nothing about who is to blame. `on_silent` gets the names of those
    that gave no result, and whether `limit_s` is over (else somebody failed); where it is and the call returns True,
    the results of the others are returned.

    Raises:
        SyncError: of the kind of the failure that says most; also where somebody took longer.
    """
    if not work:
        return {}
    tasks = {name: asyncio.create_task(_own(one), name=f"{where} {name}") for name, one in work.items()}
    try:
        _, waiting = await asyncio.wait(tasks.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = any(task.done() and task.exception() is not None for task in tasks.values())
        if failed and waiting:
            await asyncio.wait(waiting, timeout=_SETTLE_S)
    finally:
        for task in tasks.values():
            task.cancel()
    errors = {name: task.exception() for name, task in tasks.items() if task.done()}
    causes = {name: error for name, error in errors.items() if error is not None}
    slow = [name for name in tasks if name not in errors]
    may_lack = bool(slow) and on_silent(slow, not causes)
    if causes:
        # Who found wrong bytes says more than who then lost a line.
        first = min(causes.values(), key=lambda error: not isinstance(error, DigestError))
        kind = type(first) if isinstance(first, SyncError) else SyncError
        unheard = f"; no word from {', '.join(slow)}" if slow else ""
        told = "; ".join(f"{name}: {_said(error)}" for name, error in causes.items())
        raise kind(f"{where}: {told}{unheard}") from first
    if slow and not may_lack:
        raise SyncError(f"{where}: {', '.join(slow)} took longer than {limit_s:g} s")
    return {name: task.result() for name, task in tasks.items() if name in errors}


async def failures_of(work: Mapping[str, Awaitable[None]], limit_s: float, *, where: str) -> dict[str, str]:
    """Await each of `work` for `limit_s` at most, whatever becomes of the others; return who failed, and why."""
    failures: dict[str, str] = {}

    async def one(name: str, awaited: Awaitable[None]) -> None:
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await _own(awaited)
        except Exception as error:  # noqa: BLE001 -- returned as the reason
            failures[name] = f"took longer than {limit_s:g} s" if limit.expired() else _said(error)

    async with asyncio.TaskGroup() as tasks:
        for name, awaited in work.items():
            tasks.create_task(one(name, awaited), name=f"{where} {name}")
    return failures


async def _own(awaited: Awaitable[_Result]) -> _Result:
    """Await it; where it was cancelled by somebody else than who waits for it, that is a failure like any other."""
    try:
        return await awaited
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise SyncError("what it waited for was cancelled") from error


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, SyncError) else repr(error)
