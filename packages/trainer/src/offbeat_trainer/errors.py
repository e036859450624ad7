"""The exceptions of offbeat-trainer.

Several coroutines at once, with one plain error.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping


class TrainerError(Exception):
    """Root of everything offbeat-trainer raises on purpose."""


class PlanRefused(TrainerError, ValueError):
    """Settings that cannot be run: batch arithmetic, placement, capabilities. Raised before anything starts."""


class DeadlineExceeded(TrainerError, TimeoutError):
    """A wait ran out; the message says who waited for whom, for what, and how long."""


class WorkerGone(TrainerError, ConnectionError):
    """A training rank or a replica died; the message names it and says what it last did."""


class ResumeError(TrainerError, RuntimeError):
    """A run folder that cannot be continued; the message says which file disagrees and what to do."""


class LoadError(TrainerError, ImportError):
    """What a setting names by its path cannot be imported, or is not what it must be."""


class GroupFailed(TrainerError, RuntimeError):
    """A group cannot be made or scored, and is left out. `reason` is a few words: "raised", "timed out", "died", ..."""

    whose = "group"

    def __init__(self, reason: str, message: str) -> None:
        """Say why in `reason`, and what is known in `message`."""
        super().__init__(message)
        self.reason = reason

    @property
    def counted_as(self) -> str:
        """What the metrics count it by: "reward raised", "environment died", ..."""
        return f"{self.whose} {self.reason}"


class RewardFailed(GroupFailed):
    """A group could not be scored."""

    whose = "reward"


class EnvironmentFailed(GroupFailed):
    """A trajectory could not be made. `innocent`: another's failure took it along, and it may be tried again as if new."""

    whose = "environment"

    def __init__(self, reason: str, message: str, *, innocent: bool = False) -> None:
        """See `GroupFailed`."""
        super().__init__(reason, message)
        self.innocent = innocent


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
