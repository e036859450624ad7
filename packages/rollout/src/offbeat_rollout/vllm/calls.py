"""Calls of vLLM with a deadline."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat_rollout.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


async def answer_of(call: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
    """Return what vLLM answers to `call`.

    Raises:
        EngineStateError: no answer within `timeout_s`, the engine's `request_timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        raise EngineStateError(
            f"vLLM did not answer `{what}` within {timeout_s} s (`request_timeout_s`)"
        ) from None
