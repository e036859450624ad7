"""Waiting for another process: always with a deadline, an owner and a message."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayTaskError

from offbeat_trainer.concurrency import together
from offbeat_trainer.errors import DeadlineExceeded, WorkerGone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence


log = logging.getLogger(__name__)


async def answer(call: Awaitable[Any], *, owner: str, what: str, timeout_s: float) -> Any:  # noqa: ANN401
    """Return what `owner` answers to `call`.

    Raises:
        DeadlineExceeded: no answer within `timeout_s`.
        WorkerGone: the process of `owner` died.
        Exception: whatever the call itself raised over there.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for {owner} to {what} and got no answer; its log in the run folder says what it "
            "was doing. If it was only slow, raise trainer.step_timeout_s"
        ) from error
    except RayTaskError as error:
        cause = error.cause
        log.error("%s failed to %s:\n%s", owner, what, error)
        if isinstance(cause, Exception):
            cause.add_note(f"({owner}, {what})")
            raise cause from None  # Ray's wrapper holds a page of remote traceback: it is in the log
        raise
    except RayActorError as error:
        reason = str(error).strip().splitlines()
        raise WorkerGone(
            f"{owner} died while it should {what}; its log in the run folder says why "
            f"({reason[0] if reason else type(error).__name__})"
        ) from error


async def answers(
    calls: Sequence[Awaitable[Any]], *, owners: Sequence[str], what: str, timeout_s: float
) -> list[Any]:
    """Return all answers, in order; the first failure is raised once the rest have been given up."""
    return await together(
        {
            f"{owner}: {what}": answer(call, owner=owner, what=what, timeout_s=timeout_s)
            for call, owner in zip(calls, owners, strict=True)
        }
    )
