"""Several coroutines at once, with one plain error."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_TEXTS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="texts")


async def of_text(work: Callable[[], _Result]) -> _Result:
    """Return what `work`, which tokenizes or decodes, gives in a thread.

    It waits among its like: thousands of them do not keep from a thread what a step waits for.
    """
    return await asyncio.get_running_loop().run_in_executor(_TEXTS, work)


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
