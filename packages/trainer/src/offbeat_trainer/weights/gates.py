"""How generation rests while weights change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_ckptsync.seams import CACHE, GenerationGate
from offbeat_rollout import PauseMode

if TYPE_CHECKING:
    from offbeat_rollout import RolloutEngine


class TokenCount(GenerationGate):
    """Closes nothing, for an engine that takes weights between two tokens by itself; tells its tokens."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Stand at `engine`."""
        self._engine = engine

    async def tokens(self) -> int | None:
        """Return what the engine has made, while it is asked for some."""
        health = await self._engine.health()
        return health.tokens_made if health.num_running else None


class EngineGate(TokenCount):
    """Holds generation still while weights change; requests in flight go on afterwards where they were."""

    async def pause(self) -> None:
        """Freeze running requests."""
        await self._engine.pause(PauseMode.KEEP)

    async def resume(self) -> None:
        """Go on."""
        await self._engine.resume()


class SharedGate(EngineGate):
    """The gate of an engine on the trainer's devices: closed from the end of generation to the end of the next sync.

    Where the engine can give memory of its device back (`RolloutCapabilities.sleep_devices`), it does so while it rests;
    the weights wait in host memory. Elsewhere, on a CPU above all, closing is all there is to do.
    """

    shares_device = True

    def __init__(self, engine: RolloutEngine) -> None:
        """Close and open `engine`."""
        super().__init__(engine)
        self._sleeps = engine.config.device in engine.capabilities().sleep_devices
        self._is_closed = False
        self._is_asleep = False

    async def rest(self) -> None:
        """Stop generating and sleep; requests under way are frozen, or end as aborted where the engine sleeps."""
        await self.pause()
        await self.sleep()

    async def pause(self) -> None:
        """Freeze running requests; harmless while closed."""
        if not self._is_closed:
            await super().pause()
            self._is_closed = True

    async def resume(self) -> None:
        """Go on."""
        await super().resume()
        self._is_closed = False

    async def sleep(self) -> None:
        """See `GenerationGate`; harmless while asleep."""
        if self._sleeps and not self._is_asleep:
            await self._engine.pause(PauseMode.ABORT)  # what holds keys and values cannot sleep
            self._is_asleep = True
            await self._engine.sleep(1)

    async def wake(self, tags: list[str]) -> None:
        """See `GenerationGate`."""
        if self._sleeps:
            await self._engine.wake(tags)
            self._is_asleep = self._is_asleep and CACHE not in tags
