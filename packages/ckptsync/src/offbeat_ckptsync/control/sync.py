"""One sync, from begin to commit: its phases in order, each with a deadline, its clock, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeVar, cast

from offbeat_ckptsync.ends.buckets import buckets_of
from offbeat_ckptsync.ends.digest import check_echo, label_of, require_every_rank, told
from offbeat_ckptsync.errors import DigestError, LoadError, SyncError, TransferError, VersionError
from offbeat_ckptsync.toolkit.threads import in_thread, short_turns
from offbeat_ckptsync.toolkit.wire import encode
from offbeat_ckptsync.values import Bucket, Echo, Flip, Label, Phase, Sent, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from offbeat_ckptsync.seams import Member, Source
    from offbeat_ckptsync.toolkit.config import SyncConfig


_Outcome = TypeVar("_Outcome")
_SETTLE_S = 0.25


async def all_of(
    work: Mapping[str, Coroutine[object, object, _Outcome]],
    limit_s: float,
    *,
    where: str,
    on_silent: Callable[[list[str], bool], bool] = lambda names, too_late: False,
) -> dict[str, _Outcome]:
    """Await all of `work` within `limit_s`; the first failure ends the waiting.

    The error, which begins with `where`, names everyone that failed within a moment of the first: when one side dies its
    peers fail too, and which of them noticed first says nothing about who is to blame. `on_silent` gets the names of those
    that gave no result, and whether `limit_s` is over (else somebody failed); where it is and the call returns True,
    the results of the others are returned.

    Raises:
        SyncError: of the kind of the failure that says most; also where somebody took longer.
    """
    if not work:
        return {}
    tasks = {name: asyncio.create_task(_own(one), name=f"{where} {name}") for name, one in work.items()}
    try:
        _, waiting = await asyncio.wait(tasks.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = any(task.done() and task.exception() is not None for task in tasks.values())
        if failed and waiting:
            await asyncio.wait(waiting, timeout=_SETTLE_S)
    finally:
        for task in tasks.values():
            task.cancel()
    errors = {name: task.exception() for name, task in tasks.items() if task.done()}
    causes = {name: error for name, error in errors.items() if error is not None}
    slow = [name for name in tasks if name not in errors]
    may_lack = bool(slow) and on_silent(slow, not causes)
    if causes:
        # Who found wrong bytes says more than who then lost a line.
        first = min(causes.values(), key=lambda error: not isinstance(error, DigestError))
        kind = type(first) if isinstance(first, SyncError) else SyncError
        unheard = f"; no word from {', '.join(slow)}" if slow else ""
        told = "; ".join(f"{name}: {_said(error)}" for name, error in causes.items())
        raise kind(f"{where}: {told}{unheard}") from first
    if slow and not may_lack:
        raise SyncError(f"{where}: {', '.join(slow)} took longer than {limit_s:g} s")
    return {name: task.result() for name, task in tasks.items() if name in errors}


async def failures_of(work: Mapping[str, Awaitable[None]], limit_s: float, *, where: str) -> dict[str, str]:
    """Await each of `work` for `limit_s` at most, whatever becomes of the others; return who failed, and why."""
    failures: dict[str, str] = {}

    async def one(name: str, awaited: Awaitable[None]) -> None:
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await _own(awaited)
        except Exception as error:  # noqa: BLE001 -- returned as the reason
            failures[name] = f"took longer than {limit_s:g} s" if limit.expired() else _said(error)

    async with asyncio.TaskGroup() as tasks:
        for name, awaited in work.items():
            tasks.create_task(one(name, awaited), name=f"{where} {name}")
    return failures


async def _own(awaited: Awaitable[_Outcome]) -> _Outcome:
    """Await it; where it was cancelled by somebody else than who waits for it, that is a failure like any other."""
    try:
        return await awaited
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise SyncError("what it waited for was cancelled") from error


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, SyncError) else repr(error)


_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What one sync is to reach: `check` refuses a label that may not be used; `reload` repairs what is served."""

    version: int
    check: Callable[[Label], None]
    reload: bool = False
    busy_s: float = (
        0.0  # for which the source may still gather what was given up, before it can make an offer
    )
    gathered: Callable[[], None] | None = None  # is called once the source's weights may change


class Run:
    """The manager's side of the state machine. Every method is one phase and raises before the next may start.

    `flip` and `commit` do not raise for members: whoever fails there is in `fenced`, with the reason. Nor do `transfer` and
    `verify` raise for members that alone are silent, where the settings say so (`SyncConfig.silent`): they are in `silenced`.
    """

    def __init__(
        self, source: Source, config: SyncConfig, members: Mapping[str, Member], target: Target
    ) -> None:
        self._source = source
        self._config = config
        self._members = members
        self._target = target
        self._offer: SyncOffer | None = None
        self._sending: asyncio.Task[Sent] | None = None
        self._marks: dict[Phase, float] = {}
        self.flips: dict[str, Flip] = {}
        self.fenced: dict[str, str] = {}
        self._silent: dict[str, str] = {}  # who gave no word, and in which phase
        self._missed: set[str] = set()  # of these: who missed a deadline that others met
        self.silenced: dict[str, str] = {}  # of these: those without whom the sync goes on
        self.refused: dict[str, str] = {}  # of `fenced`: those that still serve the old version, whole

    async def begin(self) -> SyncOffer:
        """Get the source's offer, then every member's yes."""
        with short_turns:  # of tens of thousands of tensors in threads, beside the loop
            return await self._begin()

    async def _begin(self) -> SyncOffer:
        self._marks[Phase.BEGIN] = time.perf_counter()
        limit_s = self._config.begin_timeout_s
        offers = await self._all(
            Phase.BEGIN,
            limit_s + self._target.busy_s,
            {SOURCE: self._source.offer(self._target.version, [*self._members])},
        )
        self._offer = offer = dataclasses.replace(
            offers[SOURCE], reload=self._target.reload, silent_s=self._silent_s()
        )
        await in_thread(
            lambda: (buckets_of(offer), encode(offer)), name="plan"
        )  # whoever needs them finds them
        if not offer.endpoints:  # a sender beside a member needs the device that its `begin` leaves
            self._marks[Phase.TRANSFER] = time.perf_counter()
            self._sending = asyncio.create_task(self._send(offer), name="send weights")
        await self._all(
            Phase.BEGIN, limit_s, {name: member.begin(offer) for name, member in self._members.items()}
        )
        return offer

    async def transfer(self, offer: SyncOffer) -> tuple[Sent, dict[str, list[Echo]]]:
        """Let the source send and the members stage."""
        self._marks.setdefault(Phase.TRANSFER, time.perf_counter())
        work: dict[str, Coroutine[object, object, Sent | list[Echo]]] = {
            SOURCE: self._sent(offer),  # type: ignore[dict-item]
            **{name: self._members[name].transfer(offer.sync_id) for name in self._there},  # type: ignore[dict-item]
        }
        done = await self._all(Phase.TRANSFER, self._config.transfer_timeout_s, work)
        sent = done.pop(SOURCE)
        assert isinstance(sent, Sent)
        return sent, cast("dict[str, list[Echo]]", done)

    async def _send(self, offer: SyncOffer) -> Sent:
        if self._target.gathered is not None and await self._source.gather(offer):
            self._target.gathered()
        return await self._source.send(offer)

    async def _sent(self, offer: SyncOffer) -> Sent:
        return await (self._send(offer) if self._sending is None else self._sending)

    async def verify(
        self, offer: SyncOffer, buckets: tuple[Bucket, ...], sent: Sent, echoes: dict[str, list[Echo]]
    ) -> Label:
        """Compare every rank's echo here, let every member compare too, and return the label of the content."""
        self._marks[Phase.VERIFY] = time.perf_counter()
        where = f"version {self._target.version}: {Phase.VERIFY}"
        label = label_of(sent, offer.bucket_bytes)
        try:
            for name, of_member in echoes.items():
                require_every_rank(name, of_member)
                for echo in of_member:
                    check_echo(echo, sent, offer.manifest, buckets)
            if (sent.version, sent.manifest_digest) != (self._target.version, offer.manifest.digest):
                raise VersionError(
                    f"the source says it sent {told(label, sent.version)}; that is not its offer"
                )
            self._target.check(label)
        except SyncError as error:
            raise type(error)(f"{where}: {error}") from error
        work = {name: self._members[name].verify(offer.sync_id, sent) for name in self._there}
        await self._all(Phase.VERIFY, self._config.verify_timeout_s, work)
        return label

    async def flip(self, offer: SyncOffer, sent: Sent) -> None:
        """Let every member change over; fills `flips`, `fenced` and `refused`."""
        self._marks[Phase.FLIP] = time.perf_counter()

        async def one(name: str, member: Member) -> None:
            try:
                self.flips[name] = await member.flip(offer.sync_id, sent)
            except SyncError as error:
                if not isinstance(error, (LoadError, TransferError)):
                    self.refused[name] = str(error)
                raise

        await self._each(Phase.FLIP, self._config.flip_timeout_s, one, self._there)

    async def commit(self, label: Label) -> None:
        """Ask the canaries, then let `label` stand at every member that changed over."""
        self._marks[Phase.COMMIT] = time.perf_counter()
        await self._compare_canaries()

        async def one(name: str, member: Member) -> None:
            if (stands := await member.commit(label)) != label:
                raise VersionError(
                    f"{name} committed {told(stands, stands.version)} instead of {told(label, label.version)}"
                )

        await self._each(Phase.COMMIT, self._config.commit_timeout_s, one, [*self.flips])

    async def abort(self) -> dict[str, int]:
        """Give up everywhere; return what each member that answers serves."""
        served: dict[str, int] = {}
        if self._offer is None:
            return served
        sync_id = self._offer.sync_id

        async def one(name: str, abort: Awaitable[int | None]) -> None:
            # Who has missed a deadline just now is given a moment, not a second deadline.
            limit_s = min(self._config.begin_timeout_s, _SILENT_S if name in self._silent else math.inf)
            try:
                async with asyncio.timeout(limit_s):
                    version = await abort
            except Exception:  # noqa: BLE001 -- who does not answer is missing in `served`; the sync's own error counts
                return
            if version is not None:
                served[name] = version

        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        async with asyncio.TaskGroup() as tasks:
            # The source first: it frees receivers that wait for bytes. But a hung one holds up nobody.
            tasks.create_task(one(SOURCE, self._source.abort(sync_id)), name="abort source")
            await asyncio.sleep(0)
            for name, member in self._members.items():
                tasks.create_task(one(name, member.abort(sync_id)), name=f"abort {name}")
        return served

    async def tell_fenced(self) -> None:
        """Tell those fenced off, where they can be told; most are dead, and who does not hear it is told when it comes back."""
        fenced = self.silenced | self.fenced
        told = {name: self._members[name].fence(reason) for name, reason in fenced.items()}
        await failures_of(told, _FENCE_S, where="fence")

    @property
    def gathered_by(self) -> float:
        """By when (of `time.perf_counter`) the source has gathered all: it does so to its end, also what is given up."""
        began = self._marks.get(Phase.TRANSFER, 0.0)
        if self._sending is not None:
            began = self._marks[Phase.BEGIN]
        return began + self._config.transfer_timeout_s if began else 0.0

    def silent(self, served: Mapping[str, int]) -> dict[str, str]:
        """Return which members are to blame for a sync that failed, each with the reason; `served` is from `abort`.

        Who missed a deadline that others met, and who did not even answer an abort. Where that is every member, the fault is
        elsewhere, and none is returned.
        """
        unheard = f"{[*self._marks][-1]}: did not say what it serves when the sync had failed"
        silent = {
            name: self._silent.get(name, unheard)
            for name in self._members
            if name in self._missed or name not in served
        }
        return silent if len(silent) < len(self._members) else {}

    @property
    def _there(self) -> list[str]:
        return [name for name in self._members if name not in self.silenced]

    @property
    def reasons(self) -> str:
        """Why members were fenced off, each with its name, in the order of the members."""
        return "; ".join(f"{name}: {self.fenced[name]}" for name in self._members if name in self.fenced)

    def walls(self) -> dict[Phase, float]:
        """Return how long each phase took until now."""
        marks = [*(self._marks[phase] for phase in Phase), time.perf_counter()]
        return {phase: after - before for phase, before, after in zip(Phase, marks, marks[1:], strict=False)}

    def _silent_s(self) -> float:
        """How long a member is to wait for this manager: a transfer may use up its deadline, so may each phase after it."""
        return 2 * sum(getattr(self._config, f"{phase}_timeout_s") for phase in Phase)

    async def _compare_canaries(self) -> None:
        answers: dict[str, list[float]] = {}

        async def one(name: str, member: Member) -> None:
            answers[name] = await member.canary()

        limit_s = self._config.commit_timeout_s
        asked = [name for name, flip in self.flips.items() if flip.has_canary]
        if not asked:
            return
        await self._each(Phase.COMMIT, limit_s, one, asked)
        reference: list[float] = []  # the transfer is over, so a source that is gone is no failure
        with contextlib.suppress(SyncError, TimeoutError):
            async with asyncio.timeout(limit_s):
                reference = await self._source.reference()
        odd = odd_ones(answers, tolerance=self._config.canary_tolerance, reference=reference)
        for name, why in odd.items():
            self._fence(Phase.COMMIT, name, f"canary: {why}")

    def _fence(self, phase: Phase, name: str, why: str) -> None:
        self.fenced[name] = f"{phase}: {why}"
        self.flips.pop(name, None)

    async def _each(
        self, phase: Phase, limit_s: float, work: Callable[[str, Member], Awaitable[None]], names: list[str]
    ) -> None:
        """Run `work` for every name within `limit_s`; who fails is fenced off and holds up nobody."""
        started = {name: work(name, self._members[name]) for name in names}
        for name, why in (await failures_of(started, limit_s, where=phase)).items():
            self._fence(phase, name, why)

    async def _all(
        self, phase: Phase, limit_s: float, work: Mapping[str, Coroutine[object, object, _Result]]
    ) -> dict[str, _Result]:
        def on_silent(names: list[str], too_late: bool) -> bool:
            why = f"took longer than {limit_s:g} s" if too_late else "gave no word when others failed"
            self._silent |= dict.fromkeys(names, f"{phase}: {why}")
            if not too_late or SOURCE in names or len(names) == len(work.keys() - {SOURCE}):
                return False
            self._missed.update(names)
            if phase is Phase.BEGIN or self._config.silent == "fail":
                return False  # the source would wait for those that it has made an offer to
            self.silenced |= {name: self._silent[name] for name in names}
            return True

        return await all_of(
            work, limit_s, where=f"version {self._target.version}: {phase}", on_silent=on_silent
        )


SOURCE = "source"
"""How messages call the sending side."""

_FENCE_S = 1.0
_SILENT_S = 5.0


# Digests prove that what was staged is what was sent. The canary looks at what became of it: a loader that put a tensor
# in the wrong place, or memory that changed after it was digested.
def odd_ones(
    answers: Mapping[str, Sequence[float]], *, tolerance: float, reference: Sequence[float] = ()
) -> dict[str, str]:
    """Return who answers otherwise than the rest, and how; empty answers take no part, nor does a `reference` that is no number.

    The right answer is `reference` (the source's own) where there is one. Else it is the element-wise median, which
    one wrong replica among three or more does not move; of two that differ nobody can say which is right, so both
    are returned. An answer is right when none of its numbers is further than `tolerance` from that, and has as many, which
    is how many most have.
    """
    given = {name: list(answer) for name, answer in answers.items() if len(answer)}
    odd = {name: "answers with numbers that are none" for name, a in given.items() if not _all_finite(a)}
    given = {name: answer for name, answer in given.items() if name not in odd}
    reference = reference if _all_finite(reference) else ()
    if not given or (len(given) == 1 and not reference):
        return odd
    right = list(reference) or _middle([*given.values()])
    for name, answer in given.items():
        if len(answer) != len(right):
            odd[name] = f"answered {len(answer)} numbers, {len(right) or 'nobody knows how many'} are right"
        elif (distance := _distance(answer, right)) > tolerance:
            odd[name] = f"answers {distance:.3g} away from what is right; the tolerance is {tolerance:g}"
    return odd


def _middle(answers: list[list[float]]) -> list[float]:
    (usual, most), *others = Counter(map(len, answers)).most_common(2)
    if any(number == most for _, number in others):
        return []
    return [median(column) for column in zip(*(a for a in answers if len(a) == usual), strict=True)]


def _distance(answer: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(answer, right, strict=True))


def _all_finite(answer: Sequence[float]) -> bool:
    return all(math.isfinite(number) for number in answer)
