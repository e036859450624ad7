"""`ReplicaPool`: one door to many replicas."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from offbeat_rollout.errors import NoReplica, ReplicaGone, RequestTimeout, RolloutError
from offbeat_rollout.toolkit.routing import Gate, Router
from offbeat_rollout.toolkit.slots import GONE, HEALTH_TIMEOUT_S, LOOKS, Slot
from offbeat_rollout.types import Completion, Finish

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from offbeat_rollout.toolkit.slots import Replica
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
        self._slots: dict[str, Slot] = {}
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
        return {name: slot.version for name, slot in self._slots.items() if slot.version is not None}

    @property
    def loads(self) -> dict[str, int]:
        """Outstanding tokens by replica."""
        return dict(self._router.loads)

    def add(self, replica: Replica) -> None:
        """Take `replica` in; it gets traffic once it is admitted."""
        if replica.name in self._slots:
            raise ValueError(f"replica {replica.name!r} is here; `remove` it, or take another name")
        self._slots[replica.name] = Slot(replica)
        self._router.add(replica.name)

    async def remove(self, name: str, *, move: bool = False) -> None:
        """Give the replica no new traffic, wait until what it is doing has ended, and forget it.

        With `move`, what it is doing is begun anew elsewhere instead. Cancelled, it goes on in the background.

        Raises:
            NoReplica: its requests cannot be moved, because nobody else serves; nothing was changed.
        """
        slot = self._slot(name)
        if move and slot.running_ids and not self.versions.keys() - {name}:
            raise NoReplica(f"nobody to take what {name!r} is doing: {self.describe()}")
        self.fence(name, "it is being removed")
        slot.leaving = True
        moved = slot.running_ids if move else []
        if moved:
            self._router.add(name)  # without what it had to do
            slot.lost.set()
        await slot.idle.wait()
        if moved:  # not before: what an abort ends would be taken for an answer
            await self._quiet_abort(slot, moved)
        self._forget(slot)

    def admit(self, name: str, version: int) -> None:
        """Give the replica traffic: it serves `version`, and someone has verified that.

        After a loss this begins a new life: whatever is still heard of the old one is not held against it.
        """
        slot = self._slot(name)
        if slot.leaving:
            raise ValueError(f"replica {name!r} is being removed; `add` it again once it is gone")
        if slot.lost.is_set():
            slot = self._slots[name] = Slot(slot.replica, generation=slot.generation + 1)
        slot.version, slot.why = version, ""
        self._gate.look_again()

    def fence(self, name: str, why: str) -> None:
        """Give the replica no new traffic; what it is doing it may finish."""
        slot = self._slot(name)
        slot.version, slot.why = None, why
        self._router.forget(name)
        self._gate.look_again()

    def lose(self, name: str, why: str) -> None:
        """Give the replica up for dead: fence it and send what it was doing elsewhere."""
        slot = self._slot(name)
        slot.version, slot.why = None, why
        self._router.add(name)  # without what it had to do
        slot.lost.set()
        if self._on_lost is not None and not slot.leaving:
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
        for slot in self._slots.values():
            self._aborted.update({*slot.running_ids}.intersection(request_ids))
        async with asyncio.TaskGroup() as tasks:
            for name, slot in self._slots.items():
                if not slot.lost.is_set():
                    tasks.create_task(self._quiet_abort(slot, request_ids), name=f"abort at {name}")

    async def watch(self, period_s: float = 5.0, timeout_s: float = HEALTH_TIMEOUT_S) -> None:
        """Ask every replica at work for its health, for ever; one that is dead is lost. Run it as a task."""
        while True:
            await asyncio.sleep(period_s)
            async with asyncio.TaskGroup() as tasks:
                for name, slot in self._slots.items():
                    if (slot.version is not None or not slot.idle.is_set()) and not slot.lost.is_set():
                        tasks.create_task(self._check(slot, timeout_s), name=f"health of {name}")

    def describe(self) -> str:
        """Say in one line who serves what, and who does not and why."""
        return "; ".join(
            f"{name}: version {slot.version}, {self._router.loads[name]} tokens outstanding"
            if slot.version is not None
            else f"{name}: out ({slot.why})"
            for name, slot in self._slots.items()
        )

    def _slot(self, name: str) -> Slot:
        if name not in self._slots:
            raise ValueError(f"no replica {name!r}; there are {', '.join(self._slots) or 'none'}")
        return self._slots[name]

    def _forget(self, slot: Slot) -> None:
        name = slot.replica.name
        if self._slots.get(name) is slot:
            del self._slots[name]
            self._router.drop(name)

    def _lose(self, slot: Slot, why: str) -> None:
        """Lose this slot, unless someone else is in it by now or it is lost already."""
        name = slot.replica.name
        if self._slots.get(name) is slot and not slot.lost.is_set():
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
                    for slot, share in self._placed(entered, min_version):
                        serve = self._serve(slot, share, answers, min_version, attempt)
                        task = tasks.create_task(serve, name=f"{len(share)} requests at {slot.replica.name}")
                        # Not in the task alone: one that is cancelled before its first step never runs.
                        task.add_done_callback(partial(self._take_back, slot, share))

    def _placed(
        self, requests: Sequence[GenerateRequest], min_version: int | None
    ) -> list[tuple[Slot, dict[str, GenerateRequest]]]:
        """Return who gets which of `requests`, all counted as running there."""
        allowed = [name for name, v in self.versions.items() if min_version is None or v >= min_version]
        if not allowed:
            self._gate.leave(len(requests))
            wanted = "" if min_version is None else f" at version {min_version} or later"
            raise NoReplica(
                f"no replica{wanted} to serve {len(requests)} requests: {self.describe() or 'the pool is empty'}"
            )
        placed: list[tuple[Slot, dict[str, GenerateRequest]]] = []
        for name, indices in self._router.route(requests, allowed).items():
            slot, share = self._slots[name], {requests[i].request_id: requests[i] for i in indices}
            slot.begin(share)
            placed.append((slot, share))
        return placed

    async def _serve(
        self,
        slot: Slot,
        share: dict[str, GenerateRequest],
        answers: dict[str, Completion],
        min_version: int | None,
        attempt: int,
    ) -> None:
        """Get `share` answered by `slot`; what is left in it when that one is lost goes elsewhere."""

        def ended(completion: Completion) -> None:
            request = share.pop(completion.request_id, None)
            if request is not None:  # else it was taken back, and is made elsewhere
                answers[completion.request_id] = completion
                slot.moved()
                self._on_progress(slot.replica.name)
                self._release(slot, request)

        try:
            await self._call(slot, list(share.values()), ended)
        except ReplicaGone:
            if attempt >= self._max_attempts and not slot.leaving:
                raise
            left = self._take_back(slot, share)
            if left:
                await self._dispatch(left, answers, min_version, attempt + (not slot.leaving))
            return
        if share:
            raise RolloutError(f"replica {slot.replica.name!r} returned without an answer to {[*share]}")

    async def _call(
        self, slot: Slot, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None]
    ) -> None:
        """Let `slot` answer `requests`; raises ReplicaGone once it is lost, whoever found that out."""
        name = slot.replica.name
        call = asyncio.ensure_future(slot.replica.generate_many(requests, ended))
        lost = asyncio.create_task(slot.lost.wait(), name=f"loss of {name}")
        try:
            while not (call.done() or lost.done()):
                done, _ = await asyncio.wait(
                    (call, lost), timeout=self._stall_timeout_s / LOOKS, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    await self._check(slot, HEALTH_TIMEOUT_S)
            if not call.done():
                raise ReplicaGone(name, slot.why)
            await call
        except GONE as error:
            why = error.why if isinstance(error, ReplicaGone) else str(error) or type(error).__name__
            self._lose(slot, why)
            raise ReplicaGone(name, why) from error
        except TimeoutError as error:
            # A deadline on the way says nothing about who is at fault; how the replica is does.
            await self._check(slot, HEALTH_TIMEOUT_S)
            if slot.lost.is_set():
                raise ReplicaGone(name, slot.why) from error
            raise RequestTimeout(
                f"{len(requests)} requests were not answered in time by {name!r}, which is well: {error!r}"
            ) from error
        except asyncio.CancelledError:
            # Someone gave up the batch: tell the replica, or it goes on for nobody.
            await self._quiet_abort(slot, [request.request_id for request in requests])
            raise
        finally:
            for task in (call, lost):
                task.cancel()
            await asyncio.wait((call, lost), timeout=_ABORT_TIMEOUT_S)

    def _take_back(
        self, slot: Slot, share: dict[str, GenerateRequest], _: object = None
    ) -> list[GenerateRequest]:
        """Return what of `share` has not ended; an answer to it that still comes is not taken."""
        left = list(share.values())
        share.clear()
        for request in left:
            self._release(slot, request)
        slot.end(share)
        if slot.leaving and slot.idle.is_set():
            self._forget(slot)
        return left

    def _release(self, slot: Slot, request: GenerateRequest) -> None:
        self._gate.leave()
        if not slot.lost.is_set():  # of those, the router has forgotten what they had to do
            self._router.release(slot.replica.name, request)

    async def _quiet_abort(self, slot: Slot, request_ids: Collection[str]) -> None:
        why = await slot.abort(request_ids, _ABORT_TIMEOUT_S)
        if why:
            self._lose(slot, why)

    async def _check(self, slot: Slot, timeout_s: float) -> None:
        """Lose the replica of `slot` if it is dead, and tell if it makes tokens."""
        why = await slot.why_dead(timeout_s, self._stall_timeout_s)
        if why:
            self._lose(slot, why)
        elif slot.rose:
            self._on_progress(slot.replica.name)


async def _first_error(work: Awaitable[None]) -> None:
    """Await `work` and raise the first error out of nested groups: callers know errors, not groups of them."""
    try:
        await work
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        raise error from None
