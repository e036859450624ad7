"""`ReplicaPool`: one door to many replicas."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from offbeat_rollout.errors import NoReplica, ReplicaGone, RequestTimeout, RolloutError
from offbeat_rollout.routing import Gate, Router
from offbeat_rollout.seats import GONE, HEALTH_TIMEOUT_S, LOOKS, Seat
from offbeat_rollout.types import Completion, Finish

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from offbeat_rollout.seats import Replica
    from offbeat_rollout.types import GenerateRequest

_ABORT_TIMEOUT_S = 10.0


class ReplicaPool:
    """Splits batches over the replicas that were admitted, and carries on when one dies.

    A replica gets traffic from `admit` (at a verified version) to `fence` or its death. Requests of a replica that
    dies go to others; each request is answered once, and what had ended before the death is not made again.

    Dead is who cannot be reached, says that it is not well, or has requests and makes no token for `stall_timeout_s`;
    never who is slow. A replica that does not tell its progress (`Health.tokens_made`) is judged by its completions.
    """

    def __init__(
        self,
        replicas: Sequence[Replica] = (),
        *,
        stall_timeout_s: float = 600.0,
        max_attempts: int = 3,
        max_running: int | None = None,
        on_lost: Callable[[str, str], None] | None = None,
        on_progress: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Hold `replicas`, none admitted. A request is tried on at most `max_attempts` replicas, one after another.

        With `max_running` the pool has so many requests under way per admitted replica, and the rest wait in it: they go
        to whoever has room first, be it one that joins later. Give more than a replica works on at once.
        `on_lost` is called with the name and the reason whenever a replica is given up, `on_progress` with the name of one
        that was seen to make tokens.
        """
        self._seats: dict[str, Seat] = {}
        self._aborted: set[str] = set()  # of what runs
        self._router = Router()
        self._stall_timeout_s = stall_timeout_s
        self._max_attempts = max_attempts
        self._on_lost = on_lost
        self._on_progress = on_progress
        self._gate = Gate(lambda: None if max_running is None else max_running * len(self.versions))
        for replica in replicas:
            self.add(replica)

    @property
    def versions(self) -> dict[str, int]:
        """Versions of the replicas that get traffic, by name."""
        return {name: seat.version for name, seat in self._seats.items() if seat.version is not None}

    @property
    def loads(self) -> dict[str, int]:
        """Outstanding tokens by replica."""
        return dict(self._router.loads)

    def add(self, replica: Replica) -> None:
        """Take `replica` in; it gets traffic once it is admitted."""
        if replica.name in self._seats:
            raise ValueError(f"replica {replica.name!r} is here; `remove` it, or take another name")
        self._seats[replica.name] = Seat(replica)
        self._router.add(replica.name)

    async def remove(self, name: str, *, move: bool = False) -> None:
        """Give the replica no new traffic, wait until what it is doing has ended, and forget it.

        With `move`, what it is doing is begun anew elsewhere instead. Cancelled, it goes on in the background.

        Raises:
            NoReplica: its requests cannot be moved, because nobody else serves; nothing was changed.
        """
        seat = self._seat(name)
        if move and seat.running_ids and not self.versions.keys() - {name}:
            raise NoReplica(f"nobody to take what {name!r} is doing: {self.describe()}")
        self.fence(name, "it is being removed")
        seat.leaving = True
        moved = seat.running_ids if move else []
        if moved:
            self._router.add(name)  # without what it had to do
            seat.lost.set()
        await seat.idle.wait()
        if moved:  # not before: what an abort ends would be taken for an answer
            await self._quiet_abort(seat, moved)
        self._forget(seat)

    def admit(self, name: str, version: int) -> None:
        """Give the replica traffic: it serves `version`, and someone has verified that.

        After a loss this begins a new life: whatever is still heard of the old one is not held against it.
        """
        seat = self._seat(name)
        if seat.leaving:
            raise ValueError(f"replica {name!r} is being removed; `add` it again once it is gone")
        if seat.lost.is_set():
            seat = self._seats[name] = Seat(seat.replica, generation=seat.generation + 1)
        seat.version, seat.why = version, ""
        self._gate.look_again()

    def fence(self, name: str, why: str) -> None:
        """Give the replica no new traffic; what it is doing it may finish."""
        seat = self._seat(name)
        seat.version, seat.why = None, why
        self._router.forget(name)
        self._gate.look_again()

    def lose(self, name: str, why: str) -> None:
        """Give the replica up for dead: fence it and send what it was doing elsewhere."""
        seat = self._seat(name)
        seat.version, seat.why = None, why
        self._router.add(name)  # without what it had to do
        seat.lost.set()
        if self._on_lost is not None and not seat.leaving:
            self._on_lost(name, why)

    async def generate(self, request: GenerateRequest, *, min_version: int | None = None) -> Completion:
        """Return the completion of one request; see `generate_many`."""
        return (await self.generate_many([request], min_version=min_version))[0]

    async def generate_many(
        self, requests: Sequence[GenerateRequest], *, min_version: int | None = None
    ) -> list[Completion]:
        """Return the completions of `requests`, in their order, from replicas at `min_version` or later.

        Raises:
            NoReplica: nobody is left who may serve; the message says who is out and why.
            ReplicaGone: the last of `max_attempts` replicas was lost, too.
            RequestError: a replica says that a request can never be served; the rest were aborted.
            RequestTimeout: a request took too long; the rest were aborted.
        """
        ids = [request.request_id for request in requests]
        if len(set(ids)) != len(ids):
            raise ValueError("request ids must be unique in a batch")
        answers: dict[str, Completion] = {}
        try:
            if requests:
                await _first_error(self._dispatch(requests, answers, min_version, attempt=1))
        finally:
            self._aborted.difference_update(ids)
        return [answers[request_id] for request_id in ids]

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests wherever they are; replicas that do not answer are passed over."""
        self._gate.abort(request_ids)
        for seat in self._seats.values():
            self._aborted.update({*seat.running_ids}.intersection(request_ids))
        async with asyncio.TaskGroup() as tasks:
            for name, seat in self._seats.items():
                if not seat.lost.is_set():
                    tasks.create_task(self._quiet_abort(seat, request_ids), name=f"abort at {name}")

    async def watch(self, period_s: float = 5.0, timeout_s: float = HEALTH_TIMEOUT_S) -> None:
        """Ask every replica at work for its health, for ever; one that is dead is lost. Run it as a task."""
        while True:
            await asyncio.sleep(period_s)
            async with asyncio.TaskGroup() as tasks:
                for name, seat in self._seats.items():
                    if (seat.version is not None or not seat.idle.is_set()) and not seat.lost.is_set():
                        tasks.create_task(self._check(seat, timeout_s), name=f"health of {name}")

    def describe(self) -> str:
        """Say in one line who serves what, and who does not and why."""
        return "; ".join(
            f"{name}: version {seat.version}, {self._router.loads[name]} tokens outstanding"
            if seat.version is not None
            else f"{name}: out ({seat.why})"
            for name, seat in self._seats.items()
        )

    def _seat(self, name: str) -> Seat:
        if name not in self._seats:
            raise ValueError(f"no replica {name!r}; there are {', '.join(self._seats) or 'none'}")
        return self._seats[name]

    def _forget(self, seat: Seat) -> None:
        name = seat.replica.name
        if self._seats.get(name) is seat:
            del self._seats[name]
            self._router.drop(name)

    def _lose(self, seat: Seat, why: str) -> None:
        """Lose this seat, unless someone else sits there by now or it is lost already."""
        name = seat.replica.name
        if self._seats.get(name) is seat and not seat.lost.is_set():
            self.lose(name, why)

    async def _dispatch(
        self,
        requests: Sequence[GenerateRequest],
        answers: dict[str, Completion],
        min_version: int | None,
        attempt: int,
    ) -> None:
        def aborted(request_id: str) -> None:
            answers[request_id] = Completion.of(
                request_id=request_id, token_ids=(), logprobs=(), policy_versions=(), finish=Finish.ABORT
            )

        async with asyncio.TaskGroup() as tasks:
            with self._gate.line_up(requests, aborted) as place:
                self._gate.abort(self._aborted)  # before their replica was found dead
                while entered := await self._gate.enter(place):
                    for seat, share in self._placed(entered, min_version):
                        serve = self._serve(seat, share, answers, min_version, attempt)
                        task = tasks.create_task(serve, name=f"{len(share)} requests at {seat.replica.name}")
                        # Not in the task alone: one that is cancelled before its first step never runs.
                        task.add_done_callback(partial(self._take_back, seat, share))

    def _placed(
        self, requests: Sequence[GenerateRequest], min_version: int | None
    ) -> list[tuple[Seat, dict[str, GenerateRequest]]]:
        """Return who gets which of `requests`, all counted as running there."""
        allowed = [name for name, v in self.versions.items() if min_version is None or v >= min_version]
        if not allowed:
            self._gate.leave(len(requests))
            wanted = "" if min_version is None else f" at version {min_version} or later"
            raise NoReplica(
                f"no replica{wanted} to serve {len(requests)} requests: {self.describe() or 'the pool is empty'}"
            )
        placed: list[tuple[Seat, dict[str, GenerateRequest]]] = []
        for name, indices in self._router.route(requests, allowed).items():
            seat, share = self._seats[name], {requests[i].request_id: requests[i] for i in indices}
            seat.begin(share)
            placed.append((seat, share))
        return placed

    async def _serve(
        self,
        seat: Seat,
        share: dict[str, GenerateRequest],
        answers: dict[str, Completion],
        min_version: int | None,
        attempt: int,
    ) -> None:
        """Get `share` answered by `seat`; what is left in it when that one is lost goes elsewhere."""

        def ended(completion: Completion) -> None:
            request = share.pop(completion.request_id, None)
            if request is not None:  # else it was taken back, and is made elsewhere
                answers[completion.request_id] = completion
                seat.moved()
                self._on_progress(seat.replica.name)
                self._release(seat, request)

        try:
            await self._call(seat, list(share.values()), ended)
        except ReplicaGone:
            if attempt >= self._max_attempts and not seat.leaving:
                raise
            left = self._take_back(seat, share)
            if left:
                await self._dispatch(left, answers, min_version, attempt + (not seat.leaving))
            return
        if share:
            raise RolloutError(f"replica {seat.replica.name!r} returned without an answer to {[*share]}")

    async def _call(
        self, seat: Seat, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None]
    ) -> None:
        """Let `seat` answer `requests`; raises ReplicaGone once it is lost, whoever found that out."""
        name = seat.replica.name
        call = asyncio.ensure_future(seat.replica.generate_many(requests, ended))
        lost = asyncio.create_task(seat.lost.wait(), name=f"loss of {name}")
        try:
            while not (call.done() or lost.done()):
                done, _ = await asyncio.wait(
                    (call, lost), timeout=self._stall_timeout_s / LOOKS, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    await self._check(seat, HEALTH_TIMEOUT_S)
            if not call.done():
                raise ReplicaGone(name, seat.why)
            await call
        except GONE as error:
            why = error.why if isinstance(error, ReplicaGone) else str(error) or type(error).__name__
            self._lose(seat, why)
            raise ReplicaGone(name, why) from error
        except TimeoutError as error:
            # A deadline on the way says nothing about who is at fault; how the replica is does.
            await self._check(seat, HEALTH_TIMEOUT_S)
            if seat.lost.is_set():
                raise ReplicaGone(name, seat.why) from error
            raise RequestTimeout(
                f"{len(requests)} requests were not answered in time by {name!r}, which is well: {error!r}"
            ) from error
        except asyncio.CancelledError:
            # Someone gave up the batch: tell the replica, or it goes on for nobody.
            await self._quiet_abort(seat, [request.request_id for request in requests])
            raise
        finally:
            for task in (call, lost):
                task.cancel()
            await asyncio.wait((call, lost), timeout=_ABORT_TIMEOUT_S)

    def _take_back(
        self, seat: Seat, share: dict[str, GenerateRequest], _: object = None
    ) -> list[GenerateRequest]:
        """Return what of `share` has not ended; an answer to it that still comes is not taken."""
        left = list(share.values())
        share.clear()
        for request in left:
            self._release(seat, request)
        seat.end(share)
        if seat.leaving and seat.idle.is_set():
            self._forget(seat)
        return left

    def _release(self, seat: Seat, request: GenerateRequest) -> None:
        self._gate.leave()
        if not seat.lost.is_set():  # of those, the router has forgotten what they had to do
            self._router.release(seat.replica.name, request)

    async def _quiet_abort(self, seat: Seat, request_ids: Collection[str]) -> None:
        why = await seat.abort(request_ids, _ABORT_TIMEOUT_S)
        if why:
            self._lose(seat, why)

    async def _check(self, seat: Seat, timeout_s: float) -> None:
        """Lose the replica of `seat` if it is dead, and tell if it makes tokens."""
        why = await seat.why_dead(timeout_s, self._stall_timeout_s)
        if why:
            self._lose(seat, why)
        elif seat.rose:
            self._on_progress(seat.replica.name)


async def _first_error(work: Awaitable[None]) -> None:
    """Await `work` and raise the first error out of nested groups: callers know errors, not groups of them."""
    try:
        await work
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        raise error from None
