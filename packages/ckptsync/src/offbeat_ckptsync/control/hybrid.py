"""Hybrid mode: trainer and replica share their devices, so the replica sleeps while weights travel."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from offbeat_ckptsync.errors import LoadError
from offbeat_ckptsync.seams import SlicedMember

if TYPE_CHECKING:
    from offbeat_ckptsync.control.members import GenerationGate
    from offbeat_ckptsync.seams import CanaryMember, CommittingMember, Member, SupervisedMember
    from offbeat_ckptsync.values import Echo, Flip, Label, Layout, Sent, Status, SyncOffer

    class Whole(Member, CommittingMember, SupervisedMember, CanaryMember, Protocol):
        """A member with everything: `LocalMember`, `ControlMember` and `RemoteMember` are such."""


WEIGHTS, CACHE = "weights", "kv_cache"
"""What `SleepingGate.wake` wakes: the words of vLLM's sleep mode."""


@runtime_checkable
class SleepingGate(Protocol):
    """A gate whose engine can give its device memory away for a while."""

    async def sleep(self) -> None:
        """Free the device memory of cache and weights.

        The weights must come back with `wake`: until the flip they are the only copy of the old version (vLLM: level 1;
        level 2 would throw them away).
        """
        ...

    async def wake(self, tags: list[str]) -> None:
        """Take back the memory of `tags`, "weights" or "kv_cache"; what has none to take back does nothing."""
        ...


class HybridMember:
    """Satisfies all that members may do, around one that was given no gate of its own.

    begin: pause, sleep. Then bytes arrive while nothing is generated. flip: wake the weights, load, wake the cache, go on.
    So the weights of both versions and the cache are never on the device together. A failure before the flip wakes the
    replica as it was. With a gate that cannot sleep (on a CPU) the path is the same without it.
    """

    def __init__(self, inner: Whole, gate: GenerationGate) -> None:
        """Close `gate` from `begin` to the end of the flip, or to `abort`."""
        self._inner = inner
        self._gate = gate
        self._is_closed = False

    @property
    def name(self) -> str:
        """The inner member's."""
        return self._inner.name

    async def layouts(self) -> dict[int, Layout]:
        """See `SlicedMember.layouts`."""
        return await self._inner.layouts() if isinstance(self._inner, SlicedMember) else {}

    async def begin(self, offer: SyncOffer) -> str | None:
        """Agree, then stop generating and sleep; one that refuses goes on generating."""
        held = await self._inner.begin(offer)
        if not self._is_closed:
            self._is_closed = True
            await self._gate.pause()
            if isinstance(self._gate, SleepingGate):
                await self._gate.sleep()
        return held

    async def transfer(self, offer: SyncOffer) -> list[Echo]:
        """See `Member.transfer`."""
        return await self._inner.transfer(offer)

    async def verify(self, offer: SyncOffer, sent: Sent) -> None:
        """See `CommittingMember.verify`."""
        await self._inner.verify(offer, sent)

    async def flip(self, offer: SyncOffer, sent: Sent) -> Flip:
        """Wake the weights, load, wake the cache, resume. `pause_s` is that of the flip; what users felt began before."""
        mark = time.perf_counter()
        await self._wake(WEIGHTS)
        flip = await self._inner.flip(offer, sent)
        await self._wake(CACHE)
        await self._resume()
        return dataclasses.replace(flip, pause_s=time.perf_counter() - mark)

    async def commit(self, label: Label) -> Label:
        """See `CommittingMember.commit`."""
        return await self._inner.commit(label)

    async def canary(self) -> list[float]:
        """See `CanaryMember.canary`."""
        return await self._inner.canary()

    async def status(self) -> Status:
        """See `SupervisedMember.status`."""
        return await self._inner.status()

    async def fence(self, reason: str) -> None:
        """See `SupervisedMember.fence`."""
        await self._inner.fence(reason)

    async def abort(self, sync_id: str) -> int:
        """Drop what was staged and generate again with the old version; one whose weights are torn stays paused."""
        try:
            version = await self._inner.abort(sync_id)
        except LoadError:
            self._is_closed = False
            raise
        if self._is_closed:
            await self._wake(WEIGHTS)
            await self._wake(CACHE)
            await self._resume()
        return version

    async def _wake(self, tag: str) -> None:
        if isinstance(self._gate, SleepingGate):
            await self._gate.wake([tag])

    async def _resume(self) -> None:
        await self._gate.resume()
        self._is_closed = False
