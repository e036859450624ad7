"""The manager: brings every member to a version, or says which one did not, where, and what each serves now."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, TypeVar

from offbeat_ckptsync.digest import check_echo
from offbeat_ckptsync.errors import SyncError, SyncFailed, VersionError
from offbeat_ckptsync.plan import plan_buckets
from offbeat_ckptsync.report import make_report
from offbeat_ckptsync.types import Bucket, Echo, Flip, Phase, Sent, SyncOffer, SyncReport

if TYPE_CHECKING:
    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.interface import Member, Source

_Result = TypeVar("_Result")

OnFence = Callable[[str, str], Awaitable[None]]
"""Called with a member's name and the reason when it is fenced off: give it no more traffic, start it anew."""


class CheckpointEngineManager:
    """Knows a membership list, not how replicas are built. One sync at a time; membership may change at any moment.

    Before the flip a failure leaves every member on its old version. A member that fails in the flip is fenced off:
    it is no member any more, the others go on with the new version.
    """

    def __init__(self, source: Source, config: SyncConfig, *, on_fence: OnFence | None = None) -> None:
        """Send what `source` holds, within the deadlines of `config`."""
        self._source = source
        self._config = config
        self._on_fence = on_fence
        self._members: dict[str, Member] = {}
        self._committed: Sent | None = None
        self._turn = asyncio.Lock()

    @property
    def members(self) -> list[str]:
        """Names of the members, in the order they came."""
        return list(self._members)

    @property
    def version(self) -> int | None:
        """The version last committed here, or None before the first."""
        return None if self._committed is None else self._committed.version

    def add(self, member: Member) -> None:
        """Add a member that already serves what the others serve (say, all were started from one checkpoint).

        Raises:
            SyncError: the name is taken, or a version was committed: a late joiner comes through `catch_up`.
        """
        if self._committed is not None:
            raise SyncError(
                f"version {self._committed.version} is committed; `await catch_up({member.name!r})` brings a late "
                "joiner to it before it may serve"
            )
        self._require_new(member.name)
        self._members[member.name] = member

    def remove(self, name: str) -> None:
        """Forget a member; a sync that runs goes on with it. Harmless when it is not one."""
        self._members.pop(name, None)

    async def sync(self, version: int) -> SyncReport:
        """Bring every member to the source's current weights as `version`.

        Raises:
            VersionError: `version` is not above the committed one.
            SyncFailed: not one member changed over; names member, phase and cause, and what each serves now.
        """
        async with self._turn:
            if self._committed is not None and version <= self._committed.version:
                raise VersionError(
                    f"version {version} after {self._committed.version} was committed; versions must rise"
                )
            if not self._members:
                raise SyncFailed(f"version {version} has nobody to go to; `add` a member first")
            sent, report = await self._run(version, dict(self._members))
            self._committed = sent
            return report

    async def catch_up(self, member: Member) -> SyncReport | None:
        """Bring a late joiner to the committed version and make it a member; None when nothing is committed yet.

        Raises:
            VersionError: the source no longer holds the committed weights; `sync` the next version first.
            SyncFailed: as `sync`; the joiner is not a member then.
        """
        async with self._turn:
            self._require_new(member.name)
            report = None
            if self._committed is not None:
                _, report = await self._run(
                    self._committed.version, {member.name: member}, same_as=self._committed
                )
            self._members[member.name] = member
            return report

    def _require_new(self, name: str) -> None:
        if name in self._members:
            raise SyncError(
                f"a member is called {name!r} already; names are unique, `remove` the other one first"
            )

    async def _run(
        self, version: int, members: dict[str, Member], *, same_as: Sent | None = None
    ) -> tuple[Sent, SyncReport]:
        run = _Run(self._source, self._config, version, members, same_as)
        try:
            offer = await run.begin()
            buckets = plan_buckets(offer.manifest, offer.bucket_bytes)
            sent, echoes = await run.transfer(offer)
            await run.verify(offer, buckets, sent, echoes)
        except (Exception, asyncio.CancelledError) as error:
            served = await run.abort()
            if not isinstance(error, SyncError):
                raise
            raise SyncFailed(f"{error}. {_served_text(served)}", served=served) from error
        flips, fenced = await run.flip(offer, sent)
        run.mark(Phase.COMMIT)
        await self._fence(fenced, members)
        if not flips:
            reasons = "; ".join(f"{name}: {why}" for name, why in fenced.items())
            raise SyncFailed(f"version {version}: {Phase.FLIP}: no member changed over: {reasons}")
        return sent, dataclasses.replace(
            make_report(offer, run.walls(), sent, echoes, flips, limit_gb_per_s=self._config.limit_gb_per_s),
            fenced=fenced,
        )

    async def _fence(self, fenced: dict[str, str], members: dict[str, Member]) -> None:
        for name, reason in fenced.items():
            if self._members.get(name) is members[name]:
                del self._members[name]
            if self._on_fence is not None:
                await self._on_fence(name, reason)


class _Run:
    """One sync: its phases in order, its clock, and its end."""

    def __init__(
        self,
        source: Source,
        config: SyncConfig,
        version: int,
        members: dict[str, Member],
        same_as: Sent | None,
    ) -> None:
        self._source = source
        self._config = config
        self._version = version
        self._members = members
        self._same_as = same_as
        self._offer: SyncOffer | None = None
        self._started = time.perf_counter()
        self._marks: dict[Phase, float] = {}

    def mark(self, phase: Phase) -> None:
        self._marks[phase] = time.perf_counter()

    async def begin(self) -> SyncOffer:
        self.mark(Phase.BEGIN)
        limit_s = self._config.begin_timeout_s
        offers = await self._all(
            Phase.BEGIN, limit_s, {"source": self._source.offer(self._version, [*self._members])}
        )
        self._offer = offer = offers["source"]
        await self._all(
            Phase.BEGIN, limit_s, {name: member.begin(offer) for name, member in self._members.items()}
        )
        return offer

    async def transfer(self, offer: SyncOffer) -> tuple[Sent, dict[str, list[Echo]]]:
        self.mark(Phase.TRANSFER)
        work: dict[str, Coroutine[object, object, Sent | list[Echo]]] = {
            _SOURCE: self._source.send(offer),  # type: ignore[dict-item]
            **{name: member.transfer(offer) for name, member in self._members.items()},  # type: ignore[dict-item]
        }
        done = await self._all(Phase.TRANSFER, self._config.transfer_timeout_s, work)
        sent = done.pop(_SOURCE)
        assert isinstance(sent, Sent)
        return sent, {name: echoes for name, echoes in done.items() if isinstance(echoes, list)}

    async def verify(
        self, offer: SyncOffer, buckets: tuple[Bucket, ...], sent: Sent, echoes: dict[str, list[Echo]]
    ) -> None:
        self.mark(Phase.VERIFY)
        where = f"version {self._version}: {Phase.VERIFY}"
        for of_member in echoes.values():
            for echo in of_member:
                try:
                    check_echo(echo, sent, offer.manifest, buckets)
                except SyncError as error:
                    raise type(error)(f"{where}: {error}") from error
        if self._same_as is not None and sent.bucket_digests != self._same_as.bucket_digests:
            raise VersionError(
                f"{where}: the source's weights are no longer those committed as version {self._version}; sync the "
                "next version first"
            )

    async def flip(self, offer: SyncOffer, sent: Sent) -> tuple[dict[str, Flip], dict[str, str]]:
        self.mark(Phase.FLIP)
        limit_s = self._config.flip_timeout_s
        flips: dict[str, Flip] = {}
        fenced: dict[str, str] = {}

        async def one(name: str, member: Member) -> None:
            try:
                async with asyncio.timeout(limit_s):
                    flips[name] = await member.flip(offer, sent)
            except TimeoutError:
                fenced[name] = f"{Phase.FLIP}: took longer than {limit_s:g} s"
            except Exception as error:  # noqa: BLE001 -- becomes the reason why this member is fenced off
                fenced[name] = f"{Phase.FLIP}: {error}"

        async with asyncio.TaskGroup() as tasks:
            for name, member in self._members.items():
                tasks.create_task(one(name, member), name=f"flip {name}")
        return flips, fenced

    async def abort(self) -> dict[str, int]:
        """Give up everywhere; return what each member that answers serves."""
        served: dict[str, int] = {}
        if self._offer is None:
            return served
        sync_id = self._offer.sync_id
        limit_s = self._config.begin_timeout_s

        async def one(name: str, abort: Awaitable[int | None]) -> None:
            try:
                async with asyncio.timeout(limit_s):
                    version = await abort
            except Exception:  # noqa: BLE001 -- who does not answer is missing in `served`; the sync's own error counts
                return
            if version is not None:
                served[name] = version

        # The source first: it frees receivers that wait for bytes.
        await one(_SOURCE, self._source.abort(sync_id))
        async with asyncio.TaskGroup() as tasks:
            for name, member in self._members.items():
                tasks.create_task(one(name, member.abort(sync_id)), name=f"abort {name}")
        return served

    def walls(self) -> dict[Phase, float]:
        """Return how long each phase took until now."""
        marks = [*(self._marks[phase] for phase in Phase), time.perf_counter()]
        return {phase: after - before for phase, before, after in zip(Phase, marks, marks[1:], strict=False)}

    async def _all(
        self, phase: Phase, limit_s: float, work: dict[str, Coroutine[object, object, _Result]]
    ) -> dict[str, _Result]:
        """Await all of `work` within `limit_s`; the first failure ends the waiting.

        The error names everyone that failed within a moment of the first: when one side dies its peers fail too, and
        which of them noticed first says nothing about who is to blame.
        """
        tasks = {name: asyncio.create_task(one, name=f"{phase} {name}") for name, one in work.items()}
        try:
            _, waiting = await asyncio.wait(
                tasks.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION
            )
            failed = any(task.done() and task.exception() is not None for task in tasks.values())
            if failed and waiting:
                await asyncio.wait(waiting, timeout=_SETTLE_S)
        finally:
            for task in tasks.values():
                task.cancel()
        return self._collect(phase, limit_s, tasks)

    def _collect(
        self, phase: Phase, limit_s: float, tasks: dict[str, asyncio.Task[_Result]]
    ) -> dict[str, _Result]:
        errors = {name: task.exception() for name, task in tasks.items() if task.done()}
        causes = {name: error for name, error in errors.items() if error is not None}
        slow = [name for name in tasks if name not in errors]
        where = f"version {self._version}: {phase}"
        if causes:
            first = next(iter(causes.values()))
            kind = type(first) if isinstance(first, SyncError) else SyncError
            raise kind(
                f"{where}: " + "; ".join(f"{name}: {error}" for name, error in causes.items())
            ) from first
        if slow:
            raise SyncError(f"{where}: {', '.join(slow)} took longer than {limit_s:g} s")
        return {name: task.result() for name, task in tasks.items()}


_SOURCE = "source"
_SETTLE_S = 0.25


def _served_text(served: dict[str, int]) -> str:
    if not served:
        return "Nothing was changed"
    return "Nothing was changed; served now: " + ", ".join(
        f"{name} version {v}" for name, v in served.items()
    )
