"""A replica in the pool, from one loss to the next, and whether it moves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from offbeat_rollout.errors import EngineStateError, ReplicaGone

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from offbeat_rollout.interface import RolloutEngine
    from offbeat_rollout.types import Completion, GenerateRequest, Health

# What a replica may raise when it, not the request, is at fault.
GONE = (ReplicaGone, EngineStateError, ConnectionError)
HEALTH_TIMEOUT_S = 30.0
LOOKS = 4
"""Into how many looks a pool that waits divides the time in which a replica must make a token."""


class Replica(Protocol):
    """A generation engine as the pool sees it; how it is reached is its own business."""

    @property
    def name(self) -> str:
        """A name for messages, unique in the pool."""
        ...

    async def generate_many(
        self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None]
    ) -> object:
        """Hand each completion to `ended` soon after it is there, and return when all are.

        Raises:
            ConnectionError: the replica is gone.
            RolloutError: see `RolloutEngine.generate_many`.
        """
        ...

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `RolloutEngine.abort`."""
        ...

    async def health(self) -> Health:
        """See `RolloutEngine.health`."""
        ...


class EngineReplica:
    """Satisfies `Replica` with an engine of this process."""

    def __init__(self, name: str, engine: RolloutEngine) -> None:
        """Call `engine`, which someone else starts and stops, by `name`."""
        self.engine = engine
        self.name = name

    async def generate_many(
        self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None]
    ) -> None:
        """Forward."""
        await self.engine.generate_many(requests, ended)

    async def abort(self, request_ids: Collection[str]) -> None:
        """Forward."""
        await self.engine.abort(request_ids)

    async def health(self) -> Health:
        """Forward."""
        return await self.engine.health()


@dataclass(slots=True, eq=False)
class Slot:
    """One life of a replica: who follows a lost one under its name has a slot of the next generation.

    What a call of an old life finds out is therefore never held against the new one.
    """

    replica: Replica
    generation: int = 0
    version: int | None = None  # None: no traffic
    why: str = "not admitted yet"
    leaving: bool = False
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _shares: list[dict[str, GenerateRequest]] = field(default_factory=list[dict[str, "GenerateRequest"]])
    silent_s: float = 0.0  # since it was last seen to make progress, or had nothing to do
    rose: bool = False  # the last health told of tokens made since the one before
    moved_s: float = field(default_factory=time.monotonic)
    _looked_s: float = field(default_factory=time.monotonic)
    _tokens_made: int | None = None

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def running_ids(self) -> list[str]:
        """Requests that were sent there and have not come back."""
        return [request_id for share in self._shares for request_id in share]

    def begin(self, share: dict[str, GenerateRequest]) -> None:
        """Count what is in `share`, now and later, as running here."""
        if not self._shares:
            self.moved()
        self._shares.append(share)
        self.idle.clear()

    def end(self, share: dict[str, GenerateRequest]) -> None:
        """Forget `share`."""
        self._shares = [one for one in self._shares if one is not share]
        if not self._shares:
            self.idle.set()

    def moved(self) -> None:
        """Take note of progress."""
        self.silent_s, self.moved_s = 0.0, time.monotonic()

    async def abort(self, request_ids: Collection[str], timeout_s: float) -> str:
        """End these requests there and say why it must be given up; nothing if it lives, or is slow."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.replica.abort(request_ids)
        except GONE as error:
            return f"did not take an abort: {error!r}"
        except TimeoutError:
            return ""  # whether it is dead, its progress decides
        return ""

    async def why_dead(self, timeout_s: float, stall_timeout_s: float) -> str:
        """Ask the replica how it is, within `timeout_s`, and say why it must be given up; nothing if it lives."""
        asked_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                health = await self.replica.health()
        except GONE as error:
            return str(error) or type(error).__name__
        except TimeoutError as error:
            if self.moved_s > asked_s:
                return ""  # completions came from it meanwhile
            return str(error) or f"no answer to a health check within {timeout_s:g} s"
        self._saw(health, stall_timeout_s / LOOKS)
        if not health.ok:
            return health.detail or "said it is not well"
        if self._shares and self.silent_s >= stall_timeout_s:
            return f"made no token in {self.silent_s:.1f} s with {len(self.running_ids)} requests to answer"
        return ""

    def _saw(self, health: Health, most_s: float) -> None:
        """Take note of the progress that `health` tells; a pause is nobody's fault.

        A gap between two looks counts as silence for `most_s` at most: it may be the one who looks that stood still.
        """
        gap_s, self._looked_s = time.monotonic() - self._looked_s, time.monotonic()
        last, self._tokens_made = self._tokens_made, health.tokens_made
        self.rose = health.tokens_made is not None and (last is None or health.tokens_made > last)
        if self.rose or health.paused or not self._shares:
            self.moved()
        else:
            self.silent_s += min(gap_s, most_s)
