"""The manager: brings every member to a version, or says which one did not, where, and what each serves now.

One sync's figures, from the clocks of those who took part.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from offbeat_ckptsync.control.sync import SOURCE, Run, Target, all_of
from offbeat_ckptsync.ends.buckets import buckets_of
from offbeat_ckptsync.ends.digest import told
from offbeat_ckptsync.ends.receiver import State
from offbeat_ckptsync.errors import LoadError, PhaseError, SyncError, SyncFailed, VersionError
from offbeat_ckptsync.values import Echo, Flip, Label, Phase, Sent, Status, SyncOffer, SyncReport

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from offbeat_ckptsync.seams import Member, Source
    from offbeat_ckptsync.toolkit.config import SyncConfig


def make_report(
    offer: SyncOffer,
    walls: Mapping[Phase, float],
    sent: Sent,
    echoes: Mapping[str, list[Echo]],
    flips: Mapping[str, Flip],
) -> SyncReport:
    """Return the report of a committed sync.

    Durations come from several clocks, of the manager (`walls`), the source (`sent`) and the members; only
    differences on one clock are taken, so machines need not agree on the time.
    """
    total_s = sum(walls.values())
    gb_per_s, limit_gb_per_s = sent.num_bytes / total_s / 1e9, memcpy_gb_per_s()
    return SyncReport(
        version=offer.version,
        transport=sent.transport or offer.transport,
        why=sent.why,
        num_members=len(flips),
        num_tensors=len(offer.manifest.specs),
        num_buckets=len(sent.bucket_digests),
        num_bytes=sent.num_bytes,
        begin_s=walls[Phase.BEGIN],
        transfer_s=walls[Phase.TRANSFER],
        verify_s=walls[Phase.VERIFY],
        flip_s=walls[Phase.FLIP],
        commit_s=walls[Phase.COMMIT],
        total_s=total_s,
        gather_s=sent.gather_s,
        pack_s=sent.pack_s,
        wire_s=sent.wire_s,
        digest_s=sent.digest_s,
        receiver_digest_s=max((echo.digest_s for ranks in echoes.values() for echo in ranks), default=0.0),
        pause_s=max(flip.pause_s for flip in flips.values()),
        load_s=max(flip.load_s for flip in flips.values()),
        worst_gap_s=max((flip.gap_s for flip in flips.values() if flip.gap_s is not None), default=None),
        gb_per_s=gb_per_s,
        phases=phases_of(walls, sent, flips),
        limit_gb_per_s=limit_gb_per_s,
        fraction_of_limit=gb_per_s / limit_gb_per_s,
        members=dict(flips),
        wire_bytes=sent.wire_bytes,
        rank_bytes={f"{e.member}/{e.rank}": e.num_bytes for ranks in echoes.values() for e in ranks},
        received_bytes={f"{e.member}/{e.rank}": e.wire_bytes for ranks in echoes.values() for e in ranks},
    )


@cache
def memcpy_gb_per_s() -> float:
    """Return what one thread of this process copies, in GB/s: the best of a few copies of 32 MiB, made once, in some 30 ms."""
    source, target = (np.ones(_PROBE_BYTES, dtype=np.uint8) for _ in range(2))
    best_s = float("inf")
    for _ in range(4):
        mark = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - mark)
    return _PROBE_BYTES / best_s / 1e9


_PROBE_BYTES = 32 << 20


def phases_of(walls: Mapping[Phase, float], sent: Sent, flips: Mapping[str, Flip]) -> dict[str, float]:
    """Split the walls into the phases of `SyncReport`; they sum to the walls."""
    slowest = max(flips.values(), key=lambda flip: flip.pause_s)
    # Packing may run while the source gathers: only what is left of the source's time counts.
    pack_s = min(sent.pack_s, sent.send_s - sent.gather_s)
    return {
        "begin": walls[Phase.BEGIN],
        "gather": sent.gather_s,
        "pack": pack_s,
        "wire": sent.send_s - sent.gather_s - pack_s,
        "verify": walls[Phase.TRANSFER] - sent.send_s + walls[Phase.VERIFY],
        "drain": slowest.drain_s,
        "load": slowest.load_s,
        "flip": walls[Phase.FLIP] - slowest.drain_s - slowest.load_s,
        "commit": walls[Phase.COMMIT],
    }


_Result = TypeVar("_Result")
log = logging.getLogger(__name__)

OnFence = Callable[[str, str], Awaitable[None]]
"""Called with a member's name and the reason when it is fenced off: give it no more traffic, start it anew.

The reason begins with the phase: until `verify` the old weights are whole, and a member that answers again need not be started
anew. No sync is under way then, so it may `catch_up` the member, or another in its place."""

OnFailure = Callable[[list[str], SyncFailed], Awaitable[None]]
"""Called with the members of a sync that failed, and how. It may find out who of them is lost, and `remove` those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified:
    offer: SyncOffer
    sent: Sent
    echoes: dict[str, list[Echo]]
    label: Label


class CheckpointEngineManager:
    """Knows a membership list, not how replicas are built. One sync at a time; membership may change at any moment.

    Before the flip a failure leaves every member on its old version. A member that fails in the flip or after it, or that alone
    is silent before it (`SyncConfig.silent`), is fenced off: it is no member any more, the others go on with the new version.
    `catch_up` brings it back.
    """

    def __init__(
        self,
        source: Source,
        config: SyncConfig,
        *,
        on_fence: OnFence | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Send what `source` holds, within the deadlines of `config`."""
        self._source = source
        self._config = config
        self._on_fence = on_fence
        self._on_failure = on_failure
        self._members: dict[str, Member] = {}
        self._fenced: dict[str, str] = {}
        self._untold: dict[str, str] = {}  # of these: those whose `on_fence` is still to be called
        self._label: Label | None = None
        self._book = LabelBook()
        self._turn = asyncio.Lock()
        self._way = ("", "")  # how weights went last, and why so
        memcpy_gb_per_s()  # now, while nothing else runs; reports are held against it
        self._gathered_by = 0.0  # as of `Run`, of the last sync that failed

    @property
    def source(self) -> Source:
        """What it sends from."""
        return self._source

    @property
    def members(self) -> list[str]:
        """Names of the members, in the order they came."""
        return list(self._members)

    @property
    def fenced(self) -> dict[str, str]:
        """Those fenced off that did not come back, and why."""
        return dict(self._fenced)

    @property
    def version(self) -> int | None:
        """The version last committed here, or None before the first."""
        return None if self._label is None else self._label.version

    @property
    def label(self) -> Label | None:
        """The label last committed here, or None before the first."""
        return self._label

    def add(self, member: Member) -> None:
        """Add a member that already serves what the others serve (say, all were started from one checkpoint).

        Raises:
            SyncError: the name is taken, or a sync was committed or is under way: a late joiner comes through `catch_up`.
        """
        if self._label is not None or self._turn.locked():
            which = (
                "a sync is under way"
                if self._label is None
                else f"version {self._label.version} is committed"
            )
            raise SyncError(
                f"{which}; `await catch_up({member.name!r})` brings a late joiner to it before it may serve"
            )
        self.enlist(member)

    def enlist(self, member: Member) -> None:
        """Add a member that may not serve yet: the next sync brings it to what the others then serve.

        For a late joiner that `catch_up` could not help, because nobody holds the committed weights any more.

        Raises:
            SyncError: the name is taken.
        """
        self._require_new(member.name)
        self._members[member.name] = member

    def remove(self, name: str) -> None:
        """Forget a member; harmless when it is not one. A sync that fails because it went is run again without it."""
        self._members.pop(name, None)

    async def sync(self, version: int, *, gathered: Callable[[], None] | None = None) -> SyncReport:
        """Bring every member to the source's current weights as `version`.

        `gathered` is called once the weights are copied out, where the source can say so: they may change from then on. A sync
        with it that fails is not run again here without those who left: its weights may be gone.

        Raises:
            VersionError: `version` is not above the committed one.
            SyncFailed: not one member changed over; names member, phase and cause, and what each serves now.
        """
        if (
            type(version) is not int
        ):  # a bool, a float, a tensor: what cannot travel is refused before it is used
            raise VersionError(f"a version is a whole number (int), got {version!r}")
        async with self._in_turn():
            if self._label is not None and version <= self._label.version:
                raise VersionError(
                    f"version {version} after {self._label.version} was committed; versions must rise"
                )
            left: dict[str, str] = {}
            failures: list[str] = []
            target = Target(version=version, check=self._book.check, gathered=gathered)
            fenced: dict[str, str] = {}
            while True:
                members = dict(self._members)
                if not members:
                    raise SyncFailed(f"version {version} has nobody to go to; `add` a member first")
                try:
                    report = await self._run(self._source, members, target)
                except SyncFailed as failed:
                    failures.append(str(failed))
                    gone = await self._without(members, failed)
                    if not gone or not self._members or gathered is not None:
                        raise
                    fenced |= {name: self._fenced[name] for name in gone if name in self._untold}
                    left |= {name: str(failed) for name in gone if name not in self._untold}
                else:
                    fenced |= report.fenced
                    return dataclasses.replace(report, left=left, fenced=fenced, failures=tuple(failures))

    async def _without(self, members: dict[str, Member], failed: SyncFailed) -> list[str]:
        """Take out who is to blame for a failed sync, and return which of `members` are members no more."""
        self._take_out({n: why for n, why in failed.silent.items() if n in self._members}, members)
        if self._on_failure is not None:
            await self._on_failure([name for name in members if name not in failed.silent], failed)
        return [name for name, member in members.items() if self._members.get(name) is not member]

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncGenerator[None]:
        """Let one sync go on at a time; say afterwards who was fenced off, so that `on_fence` may have its turn."""
        try:
            async with self._turn:
                yield
        finally:
            untold, self._untold = self._untold, {}
            if self._on_fence is not None:
                told = (self._on_fence(name, reason) for name, reason in untold.items())
                for error in await asyncio.gather(*told, return_exceptions=True):
                    if error is not None:
                        raise error

    async def catch_up(self, member: Member, *, peers_only: bool = False) -> SyncReport | None:
        """Bring a late joiner to the committed version and make it a member; waits for a sync that runs.

        The weights come from a member that kept a copy of them, else from the source, which `peers_only` leaves in peace.
        None where nothing had to move: nothing is committed yet, or it serves the committed content already.

        Raises:
            VersionError: it serves, under a version that is in use, another content than the others.
            PhaseError: it still loads what it was sent before. LoadError: it is broken.
            SyncFailed: as `sync`; the joiner is not a member then. Where nobody holds the committed weights any more,
                `sync` the next version (`enlist` lets the joiner take part).
        """
        async with self._in_turn():
            self._require_new(member.name)
            report = None
            status = await self._asked(member.status(), member.name)
            if status.state == State.BROKEN:
                raise LoadError(f"{member.name} is broken and serves no version; start it anew")
            if status.state == State.FLIPPING:
                raise PhaseError(f"{member.name} still loads what it was sent before; try again when it has")
            if self._label is not None:
                report = await self._bring(member, status, self._label, peers_only=peers_only)
            elif status.label is not None and status.committed:
                self._book.bind(status.label)
            self._fenced.pop(member.name, None)
            self._members[member.name] = member
            return report

    async def _bring(
        self, member: Member, status: Status, label: Label, *, peers_only: bool
    ) -> SyncReport | None:
        if status.label == label and member.name not in self._fenced:
            await self._asked(member.commit(label), member.name)
            return None
        reload = status.version >= label.version
        if reload or member.name in self._fenced:
            why = self._fenced.get(member.name, "its content is not the committed one")
            await self._asked(member.fence(why), member.name)

        def check(other: Label) -> None:
            if other != label:
                raise VersionError(
                    f"these weights are no longer those committed as {told(label, label.version)}; sync the next "
                    "version first"
                )

        target = Target(version=label.version, check=check, reload=reload)
        # A peer first: the trainer is not disturbed, and may have gone on from the committed version.
        sources = [copies for other in self._members.values() if (copies := other.peer()) is not None]
        if not peers_only:
            sources.append(self._source)
        failures = [SyncFailed(f"no member keeps version {label.version} for {member.name}")]
        for source in sources:
            try:
                return await self._run(source, {member.name: member}, target)
            except SyncFailed as failed:
                failures.append(failed)
        raise failures[-1]

    def _require_new(self, name: str) -> None:
        if name == SOURCE:
            raise SyncError(f"no member can be called {name!r}: that is what the sending side is called")
        if name in self._members:
            raise SyncError(
                f"a member is called {name!r} already; names are unique, `remove` the other one first"
            )

    async def _asked(self, answer: Coroutine[object, object, _Result], name: str) -> _Result:
        limit_s = self._config.begin_timeout_s
        return (await all_of({name: answer}, limit_s, where=Phase.BEGIN))[name]

    async def _run(self, source: Source, members: dict[str, Member], target: Target) -> SyncReport:
        busy_s = max(self._gathered_by - time.perf_counter(), 0.0) if source is self._source else 0.0
        target = dataclasses.replace(target, busy_s=busy_s)
        run = Run(source, self._config, members, target)
        done = await self._until_verified(run)
        return await _to_its_end(self._change_over(run, done, members))

    async def _change_over(self, run: Run, done: _Verified, members: dict[str, Member]) -> SyncReport:
        version = done.offer.version
        await run.flip(done.offer, done.sent)
        if run.flips or run.fenced.keys() - run.refused.keys():
            self._book.bind(done.label)  # from here on it may be served somewhere
        else:
            served = await run.abort()
            raise SyncFailed(
                f"version {version}: {run.reasons}. {_served_text(served)}",
                served=served,
                silent=run.silenced,
            )
        await run.commit(done.label)
        if run.flips:  # before anything can go wrong where others are told
            self._label = done.label
        for name in run.flips:
            self._fenced.pop(name, None)
        await run.tell_fenced()
        self._take_out(fenced := run.silenced | run.fenced, members)
        if not run.flips:
            raise SyncFailed(f"version {version}: no member changed over: {run.reasons}")
        report = self._told(make_report(done.offer, run.walls(), done.sent, done.echoes, run.flips))
        return dataclasses.replace(
            report,
            fenced=fenced,
            content_digest=done.label.content_digest,
        )

    def _told(self, report: SyncReport) -> SyncReport:
        """Say how weights go in this process's log, with the first sync and where that changes."""
        if (way := (report.transport, report.why)) != self._way:
            self._way = way
            why = f": {report.why}" if report.why else ", as its settings say"
            log.info("version %d went by `%s`%s", report.version, report.transport, why)
        return report

    async def _until_verified(self, run: Run) -> _Verified:
        try:
            offer = await run.begin()
            buckets = buckets_of(offer)
            sent, echoes = await run.transfer(offer)
            label = await run.verify(offer, buckets, sent, echoes)
        except (Exception, asyncio.CancelledError) as error:
            self._gathered_by = run.gathered_by
            served = await _to_its_end(run.abort())
            if not isinstance(error, SyncError):
                raise
            silent = run.silent(served) if self._config.silent == "fence" else {}
            raise SyncFailed(f"{error}. {_served_text(served)}", served=served, silent=silent) from error
        return _Verified(offer=offer, sent=sent, echoes=echoes, label=label)

    def _take_out(self, fenced: dict[str, str], members: dict[str, Member]) -> None:
        """Fence members off, each with its reason; `on_fence` is called at the end of the turn."""
        self._fenced |= fenced
        self._untold |= fenced
        for name in fenced:
            if self._members.get(name) is members[name]:
                del self._members[name]


class LabelBook:
    """Remembers the last few thousand labels and refuses a second content for any of them."""

    def __init__(self) -> None:
        self._labels: dict[int, Label] = {}

    def check(self, label: Label) -> None:
        """Make sure that `label` may be used.

        Raises:
            VersionError: its version stands for another content.
        """
        known = self._labels.get(label.version)
        if known is not None and known != label:
            raise VersionError(
                f"version {label.version} stands for content {known.content_digest} already and cannot be given to "
                f"content {label.content_digest}; publish it under the next version"
            )

    def bind(self, label: Label) -> None:
        """Remember `label` for good; raises as `check`."""
        self.check(label)
        self._labels[label.version] = label
        while len(self._labels) > _KEPT:
            del self._labels[next(iter(self._labels))]


_KEPT = 4096


def _served_text(served: dict[str, int]) -> str:
    if not served:
        return "Nothing was changed"
    return "Nothing was changed; served now: " + ", ".join(
        f"{name} version {v}" for name, v in served.items()
    )


async def _to_its_end(work: Coroutine[object, object, _Result]) -> _Result:
    """Await `work`, all of whose waits have deadlines, however often the caller is cancelled: others are changing over, or back."""
    task = asyncio.create_task(work, name="to its end")
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from task.exception()
    return task.result()
