"""The party of `sync_chaos.py` over Ray: a run's own cluster, publisher and carrier."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from sync_faults.hurt import MadeUp
from sync_faults.over_ray import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import TypeVar

    from offbeat_ckptsync.toolkit.config import SyncConfig

    T = TypeVar("T")

SENDER = "sender"
"""Called so as a victim, beside the names of the replicas."""

START_S = 600.0
"""For processes to come up; only a defect uses it up."""


class OverRay(MadeUp):
    """See `sync_chaos.Party`."""

    def __init__(self, config: SyncConfig, *, deadline_s: float) -> None:
        self._runner = asyncio.Runner()
        self._opened = contextlib.AsyncExitStack()
        self._folder = tempfile.TemporaryDirectory(prefix="offbeat-sync-")
        self._deadline_s = deadline_s
        self._pid = 0
        try:
            site = Site.opened(Path(self._folder.name), config, health_period_s=1.0)
            self._site = self._do(self._opened.enter_async_context(site), START_S)
        except BaseException:
            self.close()
            raise
        self.version = 0
        self.receivers = tuple(self._site.cluster.rollout.handles)

    def kill_at(self, victim: str, num_bytes: int, delay_s: float) -> None:
        """Let the rank, or a replica, kill itself in the next sync."""

        async def plant() -> int:
            process: Any = self._site.cluster.rollout.handles.get(victim, self._site.rank)
            await process.kill_at.remote(num_bytes, delay_s)
            return await process.__ray_call__.remote(_pid_of())

        self._pid = self._do(plant(), self._deadline_s)

    def sync(self, version: int) -> list[str]:
        """Publish, as a run does."""
        self._site.version = version - 1
        return self._do(self._site.publish(), self._deadline_s)

    def was_killed(self, victim: str) -> bool:
        """Say whether its process is gone."""
        deadline = time.monotonic() + self._deadline_s
        while Path(f"/proc/{self._pid}").exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def serving(self, dead: str = "") -> dict[str, tuple[int, str, bool]]:
        """Ask every replica that has traffic."""
        return self._do(self._site.held(dead), self._deadline_s)

    def heal(self, victim: str) -> None:
        """Start the rank anew; a replica is replaced by the run itself, and gets traffic once it has caught up."""
        self._do(self._site.new_rank() if victim == SENDER else self._replaced(victim), START_S)

    async def _replaced(self, victim: str) -> None:
        rollout = self._site.cluster.rollout
        while victim not in rollout.serving or not await self._is_new(rollout.handles[victim]):  # noqa: ASYNC110 -- nobody tells
            await asyncio.sleep(0.05)

    async def _is_new(self, process: Any) -> bool:  # noqa: ANN401 -- an actor's handle
        """Say whether it answers, and with another process id than that of who was killed."""
        with contextlib.suppress(RayError):
            return await process.__ray_call__.remote(_pid_of()) != self._pid
        return False

    def close(self) -> None:
        """End Ray."""
        self._do(self._opened.aclose(), START_S)
        self._runner.close()
        self._folder.cleanup()

    def _do(self, work: Coroutine[object, object, T], limit_s: float) -> T:
        return self._runner.run(asyncio.wait_for(work, limit_s))


def _pid_of() -> Callable[[object], int]:
    """Return what an actor runs to say its process id; Ray sends a function within a function as it is."""

    def pid(_: object) -> int:
        return os.getpid()

    return pid
