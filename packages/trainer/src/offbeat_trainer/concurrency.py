"""Several coroutines at once, with one plain error."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


async def together(work: Mapping[str, Coroutine[object, object, _Result]]) -> list[_Result]:
    """Run all of `work` (task name to coroutine) side by side and return the results in order.

    When one fails the others are cancelled, waited for, and the first error is raised as it is, with what it came of: the
    others, which are logged, are usually the same failure seen by its peers.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one, name=name) for name, one in work.items()]
        return [task.result() for task in running]
    except BaseExceptionGroup as group:
        first, *others = group.exceptions
    for other in others:
        log.info("after %r came %r", first, other)
    raise first  # out here, where it is given no other context
