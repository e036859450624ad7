"""The manager's end of the line to an agent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.network.channel import Channel, dial

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_ckptsync.values import Registration
    from offbeat_ckptsync.wire import Json


class Connection:
    """The line to one agent, which carries operations (`ops.Call`). Every wait on it ends when the line does."""

    def __init__(
        self, registration: Registration, channel: Channel, on_end: Callable[[Connection, str], None]
    ) -> None:
        """Serve requests over `channel`; `on_end` is called once, with the reason, when it ends."""
        self.registration = registration
        self._channel = channel
        self._on_end = on_end
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._num_asked = 0
        self._ended = ""
        self._task = asyncio.create_task(self._listen(), name=f"listen to {registration.name}")

    @classmethod
    async def open(
        cls,
        registration: Registration,
        secret: str,
        timeout_s: float,
        on_end: Callable[[Connection, str], None],
    ) -> Connection:
        """Call a registered agent; raises `TransferError` where it does not answer or does not know the secret."""
        channel = await dial(
            registration.host, registration.port, secret, name=registration.name, timeout_s=timeout_s
        )
        return cls(registration, channel, on_end)

    @property
    def name(self) -> str:
        """The name it registered under."""
        return self.registration.name

    async def call(self, op: str, request: Json) -> Json:
        """Carry an operation there and its outcome back; the caller sets the deadline.

        Raises:
            TransferError: the line ended before the outcome came.
        """
        if self._ended:
            raise TransferError(f"{op}: {self._ended}")
        self._num_asked += 1
        number = self._num_asked
        reply: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            await self._channel.send({"id": number, "op": op, **request})
            return await reply
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Hang up."""
        self._channel.close()
        self._task.cancel()
        self._end("the manager hung up")

    async def _listen(self) -> None:
        why = "it is gone"
        try:
            while True:
                message = await self._channel.receive()
                if message.get("event") == "leave":
                    why = "it left"
                    break
                reply = self._waiting.get(cast("int", message.get("id")))
                if reply is not None and not reply.done():
                    reply.set_result(message)
        except SyncError as error:
            why = str(error)
        self._channel.close()
        self._end(why)

    def _end(self, why: str) -> None:
        if self._ended:
            return
        self._ended = why
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(TransferError(why))
        self._on_end(self, why)
