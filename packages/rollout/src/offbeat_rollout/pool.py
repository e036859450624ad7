"""`ReplicaPool`: one door to many replicas."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from offbeat_rollout.errors import EngineStateError, NoReplica, ReplicaGone, RolloutError
from offbeat_rollout.routing import Router

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Sequence

    from offbeat_rollout.types import Completion, GenerateRequest, Health

# What a replica may raise when it, not the request, is at fault.
_GONE = (ReplicaGone, EngineStateError, ConnectionError, TimeoutError)
_ABORT_TIMEOUT_S = 10.0


class Replica(Protocol):
    """A generation engine as the pool sees it; how it is reached is its own business."""

    @property
    def name(self) -> str:
        """A name for messages, unique in the pool."""
        ...

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """See `RolloutEngine.generate_many`; raises ConnectionError or TimeoutError when the replica is gone."""
        ...

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `RolloutEngine.abort`."""
        ...

    async def health(self) -> Health:
        """See `RolloutEngine.health`."""
        ...


@dataclass(slots=True)
class _Seat:
    replica: Replica
    version: int | None = None  # None: no traffic
    why: str = "not admitted yet"
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class ReplicaPool:
    """Splits batches over the replicas that were admitted, and carries on when one dies.

    A replica gets traffic from `admit` (at a verified version) to `fence` or its death. Requests of a replica that
    dies go to others; each request is answered by exactly one call, whose batch came back whole.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        call_timeout_s: float = 600.0,
        max_attempts: int = 3,
        slack: float = 0.05,
    ) -> None:
        """Hold `replicas`, none admitted. A request is tried on at most `max_attempts` replicas, one after another."""
        names = [replica.name for replica in replicas]
        if len(set(names)) != len(names):
            raise ValueError(f"replica names must be unique, got {names}")
        self._seats = {replica.name: _Seat(replica) for replica in replicas}
        self._router = Router(names, slack)
        self._call_timeout_s = call_timeout_s
        self._max_attempts = max_attempts

    @property
    def versions(self) -> dict[str, int]:
        """Versions of the replicas that get traffic, by name."""
        return {name: seat.version for name, seat in self._seats.items() if seat.version is not None}

    @property
    def loads(self) -> dict[str, int]:
        """Outstanding tokens by replica."""
        return dict(self._router.loads)

    def admit(self, name: str, version: int) -> None:
        """Give the replica traffic: it serves `version`, and someone has verified that."""
        seat = self._seat(name)
        seat.version, seat.why = version, ""
        seat.lost = asyncio.Event()

    def fence(self, name: str, why: str) -> None:
        """Give the replica no new traffic; what it is doing it may finish."""
        seat = self._seat(name)
        seat.version, seat.why = None, why
        self._router.forget(name)

    def lose(self, name: str, why: str) -> None:
        """Give the replica up for dead: fence it and send what it was doing elsewhere."""
        self.fence(name, why)
        self._seat(name).lost.set()

    async def generate_many(
        self, requests: Sequence[GenerateRequest], *, min_version: int | None = None
    ) -> list[Completion]:
        """Return the completions of `requests`, in their order, from replicas at `min_version` or later.

        Raises:
            NoReplica: nobody is left who may serve; the message says who is out and why.
            ReplicaGone: the last of `max_attempts` replicas was lost, too.
            RequestError: a replica says that a request can never be served; the rest were aborted.
        """
        ids = [request.request_id for request in requests]
        if len(set(ids)) != len(ids):
            raise ValueError("request ids must be unique in a batch")
        answers: dict[str, Completion] = {}
        if requests:
            await _first_error(self._dispatch(requests, answers, min_version, attempt=1))
        return [answers[request_id] for request_id in ids]

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests wherever they are; replicas that do not answer are passed over."""
        async with asyncio.TaskGroup() as tasks:
            for name, seat in self._seats.items():
                if not seat.lost.is_set():
                    tasks.create_task(self._quiet_abort(seat.replica, request_ids), name=f"abort at {name}")

    async def watch(self, period_s: float = 5.0, timeout_s: float = 30.0) -> None:
        """Ask every admitted replica for its health, for ever; one that is not well or late is lost. Run it as a task."""
        while True:
            await asyncio.sleep(period_s)
            async with asyncio.TaskGroup() as tasks:
                for name in self.versions:
                    tasks.create_task(self._check(name, timeout_s), name=f"health of {name}")

    def describe(self) -> str:
        """Say in one line who serves what, and who does not and why."""
        return "; ".join(
            f"{name}: version {seat.version}, {self._router.loads[name]} tokens outstanding"
            if seat.version is not None
            else f"{name}: out ({seat.why})"
            for name, seat in self._seats.items()
        )

    def _seat(self, name: str) -> _Seat:
        if name not in self._seats:
            raise ValueError(f"no replica {name!r}; there are {', '.join(self._seats)}")
        return self._seats[name]

    async def _dispatch(
        self,
        requests: Sequence[GenerateRequest],
        answers: dict[str, Completion],
        min_version: int | None,
        attempt: int,
    ) -> None:
        allowed = [name for name, v in self.versions.items() if min_version is None or v >= min_version]
        if not allowed:
            wanted = "" if min_version is None else f" at version {min_version} or later"
            raise NoReplica(
                f"no replica{wanted} to serve {len(requests)} requests: {self.describe() or 'the pool is empty'}"
            )
        shares = {
            name: [requests[index] for index in indices]
            for name, indices in self._router.route(requests, allowed).items()
        }
        async with asyncio.TaskGroup() as tasks:
            for name, share in shares.items():
                serve = self._serve(name, share, answers, min_version, attempt)
                tasks.create_task(serve, name=f"{len(share)} requests at {name}")

    async def _serve(
        self,
        name: str,
        share: Sequence[GenerateRequest],
        answers: dict[str, Completion],
        min_version: int | None,
        attempt: int,
    ) -> None:
        try:
            completions = await self._call(self._seats[name], share)
        except _GONE as error:
            self._router.release(name, share)
            gone = (
                error
                if isinstance(error, ReplicaGone)
                else ReplicaGone(name, str(error) or type(error).__name__)
            )
            self.lose(name, gone.why)
            if attempt >= self._max_attempts:
                raise gone from error
            await self._dispatch(share, answers, min_version, attempt + 1)
            return
        except BaseException:
            self._router.release(name, share)
            raise
        self._router.release(name, share)
        if [completion.request_id for completion in completions] != [request.request_id for request in share]:
            raise RolloutError(f"replica {name!r} answered other requests than it was given")
        for completion in completions:
            assert completion.request_id not in answers, "a request is answered once"
            answers[completion.request_id] = completion

    async def _call(self, seat: _Seat, share: Sequence[GenerateRequest]) -> list[Completion]:
        name = seat.replica.name
        call = asyncio.create_task(seat.replica.generate_many(share), name=f"generate at {name}")
        lost = asyncio.create_task(seat.lost.wait(), name=f"loss of {name}")
        try:
            await asyncio.wait(
                (call, lost), timeout=self._call_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if call.done():
                return call.result()
            why = seat.why if lost.done() else f"no answer within {self._call_timeout_s} s"
            raise ReplicaGone(name, why)
        except asyncio.CancelledError:
            # Someone gave up the batch: tell the replica, or it goes on for nobody.
            await self._quiet_abort(seat.replica, [request.request_id for request in share])
            raise
        finally:
            for task in (call, lost):
                task.cancel()
            await asyncio.wait((call, lost), timeout=_ABORT_TIMEOUT_S)

    async def _quiet_abort(self, replica: Replica, request_ids: Collection[str]) -> None:
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await replica.abort(request_ids)
        except _GONE as error:
            self.lose(replica.name, f"did not take an abort: {error!r}")

    async def _check(self, name: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                health = await self._seats[name].replica.health()
        except _GONE as error:
            self.lose(name, f"no answer to a health check within {timeout_s} s: {error!r}")
            return
        if not health.ok:
            self.lose(name, health.detail or "said it is not well")


async def _first_error(work: Awaitable[None]) -> None:
    """Await `work` and raise the first error out of nested groups: callers know errors, not groups of them."""
    try:
        await work
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        raise error from None
