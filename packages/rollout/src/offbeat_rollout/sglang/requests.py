"""The requests of one engine: sent, followed, ended.

Nothing is sent while the engine rests, so what comes in a pause is held here, and begins under the weights that are there then. A
request ends by what the server says; one that the server does not end when it is told to is left: its connection is closed, and it is
what has come of it so far.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from offbeat_rollout.clock import Work
from offbeat_rollout.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from offbeat_rollout.sglang.client import Client
    from offbeat_rollout.sglang.running import Running

_INSIST_S = 0.25
GRACE_S = 5.0
"""The longest that `Requests.leave` takes."""


class Requests:
    """What is under way on one server."""

    def __init__(
        self, client: Callable[[], Client], body: Callable[[Running, str], dict[str, object]]
    ) -> None:
        """Speak to `client()`; `body(running, rid)` is what is sent for a request."""
        self._client = client
        self._body = body
        self._tokens_ended = 0
        self._leaving: set[asyncio.Task[None]] = set()
        self.under_way: dict[str, Running] = {}
        self.open = asyncio.Event()  # requests may be sent
        self.open.set()
        self.server_rests = False
        self.failure = ""  # why no request can be served any more

    def work(self) -> Work:
        """Return what is being done now."""
        return Work(
            tokens_made=self._tokens_ended + sum(one.num_tokens for one in self.under_way.values()),
            at_work=[name for name, one in self.under_way.items() if one.num_tokens],
            paused=not self.open.is_set(),
        )

    async def run(self, running: Running) -> None:
        """Follow one request to its end; what has come of it is in `running`."""
        name = running.request.request_id
        self.under_way[name] = running
        call = None
        try:
            while call is None or (call.cancelled() and running.begin_anew):
                running.begin_anew = False
                running.call = call = asyncio.create_task(self._follow(running), name=f"generate {name}")
                await asyncio.wait((call,))  # the clock of requests and the pool have their eyes on it
            if not call.cancelled():
                call.result()
            elif self.failure:
                raise EngineStateError(self.failure)
        finally:
            del self.under_way[name]
            self._tokens_ended += running.num_tokens
            if call is not None and not call.done():
                call.cancel()
                self._keep(call)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these; unknown ones are ignored."""
        found = [self.under_way[name] for name in request_ids if name in self.under_way]
        calls = {one.call for one in found if one.call is not None}
        for one in found:
            one.begin_anew = False
        if not self.server_rests:  # a server that rests ends nothing
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._insist(found)
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)

    async def _insist(self, found: list[Running]) -> None:
        """Ask until they end: SGLang knows a request a moment after it was sent."""
        while sent := [one for one in found if one.rid and one.call is not None and not one.call.done()]:
            # Names are of one length and random: SGLang ends every request whose name begins with the one given.
            await asyncio.gather(*(self._client().post("/abort_request", {"rid": one.rid}) for one in sent))
            await asyncio.wait([one.call for one in sent if one.call is not None], timeout=_INSIST_S)

    async def drain(self) -> None:
        """Wait until the server has none of ours; those that wait to be sent do not count."""
        while calls := [one.call for one in self.under_way.values() if one.rid and one.call is not None]:
            await asyncio.wait(calls)  # requests end, by their own lengths and deadlines

    def flipped(self, before: int) -> None:
        """New weights are there: what has no token yet begins anew, under their salt."""
        for one in self.under_way.values():
            if one.num_tokens:
                one.flipped(before)
            elif one.rid and one.call is not None:
                one.begin_anew = True
                one.call.cancel()

    def fail(self, why: str) -> None:
        """End everything that is under way, as failed: the server may never say another word of it."""
        self.failure = why
        for one in self.under_way.values():
            one.begin_anew = False
            if one.call is not None:
                one.call.cancel()

    async def leave(self) -> None:
        """Wait for what is being said to the server of requests nobody waits for any more."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=GRACE_S)

    async def _follow(self, running: Running) -> None:
        await self.open.wait()
        running.rid = rid = secrets.token_hex(16)
        try:
            async with aclosing(self._client().stream(self._body(running, rid))) as answers:
                told = False
                async for said in answers:
                    running.take(said)
                    if running.stopped and not told:
                        told = True  # its end comes with the next answer, and the versions of its tokens with that
                        self._keep(asyncio.create_task(self._forget(rid), name=f"end {rid}"))
        except BaseException:
            self._keep(asyncio.create_task(self._forget(rid), name=f"abort {running.request.request_id}"))
            raise
        finally:
            running.rid = ""

    async def _forget(self, rid: str) -> None:
        """Tell the server that nobody waits for this one; a server that is gone needs no telling."""
        with suppress(EngineStateError):
            await self._client().post("/abort_request", {"rid": rid})

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
