"""How new weights get into SGLang's server: by its own calls, which others make while the engine has it rest."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from offbeat_rollout.interface import ServerUpdates
from offbeat_rollout.weight_files import folder_specs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from offbeat_rollout.sglang.config import SglangConfig
    from offbeat_rollout.sglang.server import Server
    from offbeat_rollout.types import WeightSpec


class SglangUpdates(ServerUpdates):
    """The updates of one `SglangEngine`."""

    def __init__(
        self,
        config: SglangConfig,
        server: Callable[[], Server],
        resting: Callable[[int, bool], AbstractAsyncContextManager[None]],
    ) -> None:
        """Tell of `server()`; within `resting(version, recompute_kv)` it rests, and after it serves `version`."""
        self._config = config
        self._server = server
        self._resting = resting
        self._specs: list[WeightSpec] = []
        self._one_at_a_time = asyncio.Lock()  # SGLang would give one update the answer to another, and end

    @property
    def url(self) -> str:
        """See `ServerUpdates`."""
        return self._server().url

    @property
    def key(self) -> str:
        """See `ServerUpdates`."""
        return self._server().key

    @property
    def folder(self) -> Path:
        """See `ServerUpdates`."""
        return self._server().memory

    @property
    def way(self) -> str:
        """See `ServerUpdates`."""
        return self._config.updates_by

    async def specs(self) -> list[WeightSpec]:
        """Return what the model folder holds, in the dtype served; no engine has to run for it."""
        if not self._specs:
            self._specs = await asyncio.to_thread(
                lambda: folder_specs(self._config.model_path, self._config.dtype)
            )
        return list(self._specs)

    async def load(
        self, load: Callable[[], Awaitable[None]], version: int, *, recompute_kv: bool = False
    ) -> None:
        """See `ServerUpdates`; a second call waits for the first one's end."""
        async with self._one_at_a_time, self._resting(version, recompute_kv):
            await load()
