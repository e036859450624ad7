"""The server's HTTP interface (SGLang 0.5.23), each call with a deadline.

The requests of one engine: sent, followed, ended.

Nothing is sent while the engine rests, so what comes in a pause is held here, and begins under the weights that are there then. A
request ends by what the server says; one that the server does not end when it is told to is left: its connection is closed, and it is
what has come of it so far.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from offbeat_rollout.errors import EngineStateError
from offbeat_rollout.toolkit.clock import Work

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Mapping

    from aiohttp import ClientSession

    from offbeat_rollout.sglang.running import Running


_SHOWN = 500
_DATA, _END = b"data: ", b"[DONE]"


class ServerSaysNo(EngineStateError):
    """The server answered, and refused."""


class Client:
    """Calls one server, from one event loop."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        """Speak to `url`, which wants `key`; a call that says nothing else has `timeout_s`, the engine's `request_timeout_s`."""
        from aiohttp import ClientSession, ClientTimeout, TCPConnector

        self._timeout_s = timeout_s
        self._session: ClientSession = ClientSession(
            url,
            connector=TCPConnector(limit=0),
            timeout=ClientTimeout(total=None),
            headers={"Authorization": f"Bearer {key}"},
        )

    async def close(self) -> None:
        """Leave all connections."""
        await self._session.close()

    def _open(self) -> ClientSession:
        if self._session.closed:
            raise EngineStateError("the engine was stopped meanwhile")
        return self._session

    async def answers(self, timeout_s: float) -> bool:
        """Say whether the server answers to what it answers in every state, paused ones too (`/health` does not).

        Raises:
            EngineStateError: this client was closed.
        """
        self._open()
        try:
            await self.call("GET", "/model_info", timeout_s=max(timeout_s, 1.0))
        except EngineStateError:
            return False
        return True

    async def post(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Return what `path` answers to `body`.

        Raises:
            ServerSaysNo: it answered with an error.
            EngineStateError: it did not answer in time.
        """
        return await self.call("POST", path, {} if body is None else body)

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """As `post`, by any method and within `timeout_s`."""
        from aiohttp import ClientError

        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s), self._open().request(method, path, json=body) as answer:
                raw = await answer.read()
        except TimeoutError:
            raise EngineStateError(
                f"SGLang did not answer {path} within {limit_s:g} s (`request_timeout_s`)"
            ) from None
        except (ClientError, OSError) as error:
            raise EngineStateError(
                f"SGLang's server is not there: {path}: {error!r}; its log says why"
            ) from error
        if answer.status != 200:
            raise ServerSaysNo(
                f"SGLang answered {path} with {answer.status}: {raw[:_SHOWN].decode(errors='replace')}"
            )
        try:
            return json.loads(raw or b"{}")
        except ValueError as error:
            raise EngineStateError(f"SGLang answered {path} with no JSON: {raw[:_SHOWN]!r}") from error

    async def stream(self, body: Mapping[str, object]) -> AsyncGenerator[dict[str, Any]]:
        """Yield what `/generate` says of one request, until it has ended.

        Raises:
            ServerSaysNo: the server refuses it.
            EngineStateError: the connection was lost.
        """
        from aiohttp import ClientError

        try:
            async with self._open().post("/generate", json=body) as answer:
                if answer.status != 200:
                    said = (await answer.read())[:_SHOWN].decode(errors="replace")
                    raise ServerSaysNo(f"SGLang answered /generate with {answer.status}: {said}")
                async for event in events(answer.content.iter_any()):
                    text = event.removeprefix(_DATA)
                    if text == _END:
                        return
                    yield json.loads(text)
        except (ClientError, OSError) as error:
            raise EngineStateError(
                f"SGLang's server is not there: /generate: {error!r}; its log says why"
            ) from error
        raise EngineStateError("SGLang left /generate without a word; its log may say why")


async def events(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Yield what ends with a blank line, however it is cut into `pieces`; each byte is searched once."""
    rest = bytearray()
    async for piece in pieces:
        searched = max(len(rest) - 1, 0)  # the last byte may be the first of a blank line
        rest += piece
        while (end := rest.find(b"\n\n", searched)) >= 0:
            yield bytes(rest[:end])
            del rest[: end + 2]
            searched = 0


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
            at_work={name: one.num_tokens for name, one in self.under_way.items() if one.num_tokens},
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
