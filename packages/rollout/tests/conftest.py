# pyright: basic
"""What tests of the rollout package share."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from offbeat_rollout.toolkit import slots


@pytest_asyncio.fixture(loop_scope="module")
async def virtual_time():
    """Let time pass only where the loop would wait: then all of it at once, whatever the machine does meanwhile.

    For what lives in this loop alone: nobody waits for a thread or a process here.
    """
    loop: Any = asyncio.get_running_loop()  # its selector is nobody's business but asyncio's
    now_s = loop.time()
    with pytest.MonkeyPatch.context() as patch:
        select = loop._selector.select

        def jump(timeout_s=None):
            nonlocal now_s
            if not timeout_s:
                return select(timeout_s)
            now_s += timeout_s
            return select(0)

        patch.setattr(loop, "time", lambda: now_s)
        patch.setattr(loop._selector, "select", jump)
        patch.setattr(slots, "time", SimpleNamespace(monotonic=loop.time))
        yield
