"""Members and sources in other processes, as a manager sees them: requests over the line to their `Agent`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.network.channel import Channel, dial
from offbeat_ckptsync.values import Echo, Flip, Label, Needs, Registration, Sent, Status, SyncOffer
from offbeat_ckptsync.wire import Json, decode, decode_error, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.values import Layout


class Peer:
    """The line to one agent. Every wait on it ends when the line does."""

    def __init__(
        self, registration: Registration, channel: Channel, on_end: Callable[[Peer, str], None]
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
    async def call(
        cls, registration: Registration, secret: str, timeout_s: float, on_end: Callable[[Peer, str], None]
    ) -> Peer:
        """Call a registered agent; raises `TransferError` where it does not answer or does not know the secret."""
        channel = await dial(
            registration.host, registration.port, secret, name=registration.name, timeout_s=timeout_s
        )
        return cls(registration, channel, on_end)

    @property
    def name(self) -> str:
        """The name it registered under."""
        return self.registration.name

    async def ask(self, op: str, request: Json | None = None) -> Json:
        """Ask and return the answer; the caller sets the deadline.

        Raises:
            SyncError: of the kind that the other side raised.
            TransferError: the line ended before the answer.
        """
        if self._ended:
            raise TransferError(f"{op}: {self._ended}")
        self._num_asked += 1
        number = self._num_asked
        reply: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            await self._channel.send({"id": number, "op": op, **(request or {})})
            answer = await reply
        finally:
            del self._waiting[number]
        if "error" in answer:
            raise decode_error(answer["error"], where=op)
        return cast("Json", answer.get("ok"))

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


class RemoteMember:
    """Satisfies `Member` and all that members may do besides."""

    def __init__(self, peer: Peer, config: SyncConfig) -> None:
        """Drive the member behind `peer`; `config` says how long it is to wait for a manager that is silent."""
        self.line = peer
        c = config
        # A transfer may use up its whole deadline, and so may each phase after it.
        self._silent_s = 2 * (
            c.begin_timeout_s
            + c.transfer_timeout_s
            + c.verify_timeout_s
            + c.flip_timeout_s
            + c.commit_timeout_s
        )

    @property
    def name(self) -> str:
        """The name it registered under."""
        return self.line.name

    async def layouts(self) -> dict[int, Layout]:
        """See `SlicedMember.layouts`."""
        ranks = cast("dict[str, object]", (await self.line.ask("layouts")).get("ranks"))
        return {int(rank): decode(Needs, needs).cuts for rank, needs in ranks.items()}

    async def begin(self, offer: SyncOffer) -> str:
        """See `Member.begin`."""
        answer = await self.line.ask("begin", {"offer": encode(offer), "silent_s": self._silent_s})
        return str(answer.get("held", ""))

    async def transfer(self, offer: SyncOffer) -> list[Echo]:
        """See `Member.transfer`."""
        answer = await self.line.ask("transfer", {"offer": encode(offer)})
        return [decode(Echo, echo) for echo in cast("list[object]", answer.get("echoes"))]

    async def verify(self, offer: SyncOffer, sent: Sent) -> None:
        """See `CommittingMember.verify`."""
        await self.line.ask("verify", {"offer": encode(offer), "sent": encode(sent)})

    async def flip(self, offer: SyncOffer, sent: Sent) -> Flip:
        """See `Member.flip`."""
        answer = await self.line.ask("flip", {"offer": encode(offer), "sent": encode(sent)})
        return decode(Flip, answer.get("flip"))

    async def commit(self, label: Label) -> Label:
        """See `CommittingMember.commit`."""
        return decode(Label, (await self.line.ask("commit", {"label": encode(label)})).get("label"))

    async def abort(self, sync_id: str) -> int:
        """See `Member.abort`."""
        return int(cast("int", (await self.line.ask("abort", {"sync_id": sync_id})).get("version")))

    async def status(self) -> Status:
        """See `SupervisedMember.status`."""
        return decode(Status, (await self.line.ask("status")).get("status"))

    async def fence(self, reason: str) -> None:
        """See `SupervisedMember.fence`."""
        await self.line.ask("fence", {"reason": reason})

    async def canary(self) -> list[float]:
        """See `CanaryMember.canary`."""
        return cast("list[float]", (await self.line.ask("canary")).get("values"))

    def peer(self) -> RemoteSource:
        """See `PeerMember.peer`."""
        return RemoteSource(lambda: self.line)


class RemoteSource:
    """Satisfies `Source`; who it is may change between syncs (a trainer that was started anew)."""

    def __init__(self, find: Callable[[], Peer]) -> None:
        """Ask the peer that `find` returns; it raises `TransferError` where there is none."""
        self._find = find

    async def offer(self, version: int, members: list[str]) -> SyncOffer:
        """See `Source.offer`."""
        answer = await self._find().ask("offer", {"version": version, "members": list(members)})
        return decode(SyncOffer, answer.get("offer"))

    async def send(self, offer: SyncOffer) -> Sent:
        """See `Source.send`."""
        return decode(Sent, (await self._find().ask("send", {"offer": encode(offer)})).get("sent"))

    async def abort(self, sync_id: str) -> None:
        """See `Source.abort`."""
        await self._find().ask("abort_send", {"sync_id": sync_id})

    async def canary(self) -> list[float]:
        """See `CanaryMember.canary`."""
        return cast("list[float]", (await self._find().ask("canary")).get("values"))
