"""Several coroutines at once, with one plain error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

_Result = TypeVar("_Result")


async def together(work: Mapping[str, Coroutine[object, object, _Result]]) -> list[_Result]:
    """Run all of `work` (task name to coroutine) side by side and return the results in order.

    When one fails the others are cancelled, waited for, and the first error is raised as it is: the others are
    usually the same failure seen by its peers.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one, name=name) for name, one in work.items()]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return [task.result() for task in running]
