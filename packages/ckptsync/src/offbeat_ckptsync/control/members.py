"""The member: one replica, its gate and its canary, over whatever reaches its ranks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from offbeat_ckptsync.control.ranks import Control, EngineRanks, LocalRank, Mailbox, Ranks
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.errors import LoadError, SyncError, TransferError
from offbeat_ckptsync.seams import CACHE, WEIGHTS, GenerationGate, Member, Source, Transport, WeightSource
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.values import Echo, Flip, Label, Manifest, Sent, Status, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from offbeat_ckptsync.ends.receiver import Receiver

AskCanary = Callable[[], Awaitable[list[float]]]
"""Asks a replica the fixed question whose answer is to agree between replicas after a flip; see `canary`."""


class ReplicaMember(Member):
    """One replica, where it lives: pauses it around the flip, and says what all of its ranks together serve."""

    def __init__(
        self,
        name: str,
        ranks: Ranks,
        *,
        gate: GenerationGate,
        canary: AskCanary | None = None,
        copies: Source | None = None,
    ) -> None:
        """Drive `ranks`; `gate` is closed while their weights change, `canary` is asked after it.

        Where nothing computes with the weights then, say so: `gate=NO_TRAFFIC`.

        `copies` sends what is served to joiners; see `Member.peer`.
        """
        self._name = name
        self._ranks = ranks
        self._gate = gate
        self._ask_canary = canary
        self._copies = copies
        self._is_closed = False  # since `begin`: a gate that shares its device
        self._gaps: Gaps | None = None  # of the sync that is open

    @property
    def name(self) -> str:
        """See `Member.name`."""
        return self._name

    async def begin(self, offer: SyncOffer) -> None:
        """See `Member.begin`. On a shared device generation then stops and the engine sleeps; one that refuses goes on."""
        self._look_away()
        self._gaps = await Gaps.watched(self._gate, offer.silent_s)
        if self._copies is not None:
            await self._copies.trim()  # what joiners were sent from
        await self._ranks.ask("begin", offer)
        if self._gate.shares_device and not self._is_closed:
            self._is_closed = True
            await self._gate.pause()
            await self._gate.sleep()

    async def transfer(self, sync_id: str) -> list[Echo]:
        """See `Member.transfer`."""
        return await self._ranks.ask("transfer", sync_id)

    async def verify(self, sync_id: str, sent: Sent) -> None:
        """See `Member.verify`."""
        await self._ranks.ask("verify", sync_id, sent)

    async def flip(self, sync_id: str, sent: Sent) -> Flip:
        """Pause, load, resume; after a torn load, or one of which a rank says nothing, generation stays paused.

        `pause_s` is that of the flip; on a shared device what users felt began before.
        """
        mark = time.perf_counter()
        await self._close()
        drain_s = time.perf_counter() - mark
        try:
            flips: list[Flip] = await self._ranks.ask("flip", sync_id, sent)
        except SyncError as error:
            self._look_away()
            if not isinstance(error, (LoadError, TransferError)):
                await self._open()
            raise
        await self._open()
        pause_s = time.perf_counter() - mark
        return Flip(
            member=self._name,
            version=sent.version,
            pause_s=pause_s,
            load_s=max(flip.load_s for flip in flips),
            drain_s=drain_s,
            gap_s=None if self._gaps is None else await self._gaps.until_the_next(),
            has_canary=self._ask_canary is not None,
        )

    async def commit(self, label: Label) -> Label:
        """See `Member.commit`."""
        stands: list[Label] = await self._ranks.ask("commit", label)
        return next((other for other in stands if other != label), label)

    async def abort(self, sync_id: str) -> int:
        """See `Member.abort`. What slept wakes as it was; one whose weights are torn stays paused."""
        self._look_away()
        try:
            versions = set(await self._ranks.ask("abort", sync_id))
            if len(versions) != 1:
                raise LoadError(
                    f"ranks of {self._name} serve different versions {sorted(versions)}; start it anew"
                )
        except LoadError:
            self._is_closed = False
            raise
        if self._is_closed:
            await self._gate.wake([WEIGHTS])
            await self._open()
        return versions.pop()

    async def status(self) -> Status:
        """See `Member.status`; raises `LoadError` where ranks differ."""
        ranks: set[Status] = set(await self._ranks.ask("status"))
        if len({(each.version, each.label) for each in ranks}) != 1:
            raise LoadError(f"ranks of {self._name} serve different versions {ranks}; start it anew")
        return min(ranks, key=lambda each: each.committed)

    async def fence(self, reason: str) -> None:
        """See `Member.fence`."""
        await self._ranks.ask("distrust")

    async def canary(self) -> list[float]:
        """See `Member.canary`."""
        return [] if self._ask_canary is None else await self._ask_canary()

    def peer(self) -> Source | None:
        """See `Member.peer`."""
        return self._copies

    def _look_away(self) -> None:
        if self._gaps is not None:
            self._gaps.close()
            self._gaps = None

    async def _close(self) -> None:
        if self._is_closed:
            await self._gate.wake([WEIGHTS])
            return
        try:
            await self._gate.pause()
        except Exception as error:
            await self._gate.resume()  # it may have paused in part
            raise SyncError(
                f"{self._name} could not be paused: {error!r}; it serves what it served before"
            ) from error

    async def _open(self) -> None:
        if self._is_closed:
            await self._gate.wake([CACHE])
        await self._gate.resume()
        self._is_closed = False


class Gaps:
    """The times between two tokens of a replica while a sync goes on, as its gate counts them; `worst_s` is the longest.

    One that has not ended counts as far as it has come.
    """

    def __init__(self, gate: GenerationGate, limit_s: float) -> None:
        """Look for `limit_s` at most; a gate that cannot say any more ends it."""
        self.worst_s: float | None = None
        self._gate = gate
        self._last: tuple[int, float] | None = None  # a count, and since when
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._watch(limit_s), name="watch tokens")

    @classmethod
    async def watched(cls, gate: GenerationGate, silent_s: float) -> Gaps | None:
        """Begin to look, until the manager has been silent for too long, if a request is under way."""
        with contextlib.suppress(Exception):  # the sync finds out what is wrong with its engine
            if await gate.tokens() is not None:
                return cls(gate, silent_s if silent_s > 0 else _WATCH_S)
        return None

    async def until_the_next(self) -> float | None:
        """Give the first token of the new weights a moment to come, look no more, and return the worst."""
        if self._last is not None:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NEXT_TOKEN_S):
                    await self._changed.wait()
        self.close()
        return self.worst_s

    def close(self) -> None:
        """Look no more."""
        self._task.cancel()

    async def _watch(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        with contextlib.suppress(Exception):  # as above
            while time.monotonic() < until:
                self._saw(await self._gate.tokens(), time.perf_counter())
                await asyncio.sleep(_LOOK_S)
        self._last = None

    def _saw(self, count: int | None, now: float) -> None:
        if count is None:
            self._last = None
            self._changed.set()
            return
        if self._last is not None:
            gap_s = now - self._last[1]
            self.worst_s = gap_s if self.worst_s is None else max(self.worst_s, gap_s)
        if self._last is None or self._last[0] != count:
            self._last = (count, now)
            self._changed.set()


_LOOK_S = 0.005
_NEXT_TOKEN_S = 0.05
_WATCH_S = 600.0


class LockGate(GenerationGate):
    """Keeps requests of this process from weights that change: each computes inside `with gate`, or `async with gate`.

    Any number of requests are inside at once. A flip waits until those have left, and lets the next ones in when it is done.
    """

    def __init__(self) -> None:
        """Be open."""
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_closed = False

    def __enter__(self) -> None:
        """Wait until no flip is under way."""
        with self._changed:
            self._changed.wait_for(self._let_in)

    def __exit__(self, *_: object) -> None:
        """Let a flip that waits begin."""
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    async def __aenter__(self) -> None:
        """As `__enter__`, beside the event loop."""
        while not self._let_in():  # noqa: ASYNC110 -- a flip ends in another thread
            await asyncio.sleep(_LOOK_S)

    async def __aexit__(self, *_: object) -> None:
        """As `__exit__`."""
        self.__exit__()

    async def pause(self) -> None:
        """Let nobody in, and wait until nobody is inside; the flip's deadline bounds it."""
        with self._changed:
            self._is_closed = True
        while self._num_inside:  # noqa: ASYNC110 -- as above
            await asyncio.sleep(_LOOK_S)

    async def resume(self) -> None:
        """Let requests in again."""
        with self._changed:
            self._is_closed = False
            self._changed.notify_all()

    def _let_in(self) -> bool:
        with self._changed:
            self._num_inside += not self._is_closed
            return not self._is_closed


class LocalMember(ReplicaMember):
    """A receiver in this process, say for a Transformers replica."""

    def __init__(
        self,
        receiver: Receiver,
        transport: Transport,
        *,
        gate: GenerationGate,
        canary: AskCanary | None = None,
        copies: Source | None = None,
    ) -> None:
        """Drive `receiver`, whose bytes come by `transport`; see `ReplicaMember` for the rest."""
        name = receiver.rank_id.member
        super().__init__(name, LocalRank(receiver, transport), gate=gate, canary=canary, copies=copies)


class ControlMember(ReplicaMember):
    """An engine elsewhere (a vLLM server, an actor), whose ranks each run a `member.rank.Rank`."""

    def __init__(
        self,
        name: str,
        control: Control,
        *,
        mailbox: Mailbox,
        config: SyncConfig,
        gate: GenerationGate,
        canary: AskCanary | None = None,
    ) -> None:
        """Drive the engine behind `control`; see `EngineRanks`, and `ReplicaMember` for the rest."""
        super().__init__(name, EngineRanks(name, control, mailbox, config), gate=gate, canary=canary)


def local_member(
    receiver: Receiver,
    config: SyncConfig,
    *,
    gate: GenerationGate,
    canary: AskCanary | None = None,
) -> LocalMember:
    """Return a member for a receiver of this process that also hands what it keeps on to joiners."""
    copies = Sender(StagedCopy(receiver), config)
    return LocalMember(
        receiver,
        make_transport(config.transport, config),
        gate=gate,
        canary=canary,
        copies=LocalSource(copies),
    )


class StagedCopy(WeightSource):
    """What a replica serves as a source for joiners, while training goes on: the bytes as they were staged.

    They are there where the transport stages in the receiver's own memory, beside the live weights, and where the sink serves
    from where they lie; not where it copies out of `shm`, whose segment goes back to the source. Publish them with the bucket
    size of the sync that brought them: the label covers the bucket plan, and the manager takes no other label.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def manifest(self) -> Manifest:
        """Return what is served; raises `TransferError` where no copy is kept."""
        return self._receiver.copy()[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the copy; raises `TransferError` where none is kept."""
        yield from self._receiver.copy()[1]
