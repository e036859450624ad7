"""The server's HTTP interface (SGLang 0.5.23), each call with a deadline."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from offbeat_rollout.errors import EngineStateError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Mapping

    from aiohttp import ClientSession

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
