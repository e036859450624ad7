"""The end of a member, or of a source, that a manager elsewhere calls: it registers itself and does what it is asked.

A request is {"id": n, "op": .., ..}; its answer {"id": n, "ok": {..}} or {"id": n, "error": {"type", "message"}}. Requests are
handled side by side, so that `abort` overtakes a `transfer` that hangs. What the ops take and give:

    member  layouts {} -> {ranks}
            begin {offer, silent_s} -> {held}             transfer {offer} -> {echoes}     verify {offer, sent} -> {}
            flip {offer, sent} -> {flip}              commit {label} -> {label}        abort {sync_id} -> {version}
            status {} -> {status}                     fence {reason} -> {}             canary {} -> {values}
    both    ping {} -> {}
    source  offer {version, members} -> {offer}       send {offer} -> {sent}           abort_send {sync_id} -> {}

The agent says {"event": "leave"} before it goes of its own will. It gives up an open sync when the line breaks, and
when the manager is silent for `silent_s` after `begin`; what was flipped stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.errors import SyncError, TransferError, WireError
from offbeat_ckptsync.network.channel import Channel, ChannelClosed, answer
from offbeat_ckptsync.network.membership import register
from offbeat_ckptsync.seams import CanaryMember, CommittingMember, SlicedMember, SupervisedMember
from offbeat_ckptsync.values import Label, Needs, Registration, Sent, SyncOffer
from offbeat_ckptsync.wire import Json, decode, encode, encode_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from offbeat_ckptsync.seams import Member, Source

_log = logging.getLogger(__name__)
_HELLO_S = 10.0
_RETRY_S = 0.2


class Agent:
    """Serves one `Member`, one `Source`, or both, to the one manager that calls last."""

    def __init__(
        self,
        name: str,
        secret: str,
        *,
        member: Member | None = None,
        source: Source | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """Listen on `host`, loopback unless told otherwise, and answer only those who know `secret`.

        Raises:
            ValueError: there is nothing to serve, or no secret.
        """
        if member is None and source is None:
            raise ValueError("an agent serves a member or a source; give it one")
        if not secret:
            raise ValueError("`secret` is empty: anybody could give this member weights; share a random one")
        self.name = name
        self._secret = secret
        self._member = member
        self._source = source
        self._host = host
        self._server: asyncio.Server | None = None
        self._channel: Channel | None = None
        self._called = asyncio.Event()
        self._open: str = ""  # the sync that is open at the member
        self._sending: str = ""  # the sync that is open at the source
        self._silence: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ops: dict[str, Callable[[Json], Awaitable[Json]]] = {
            "ping": self._ping,
            "layouts": self._layouts,
            "begin": self._begin,
            "transfer": self._transfer,
            "verify": self._verify,
            "flip": self._flip,
            "commit": self._commit,
            "abort": self._abort,
            "status": self._status,
            "fence": self._fence,
            "canary": self._canary,
            "offer": self._offer,
            "send": self._send,
            "abort_send": self._abort_send,
        }

    @property
    def has_manager(self) -> bool:
        """Say whether a manager is on the line."""
        return self._channel is not None

    async def start(self, *, layout: dict[str, str | int | float] | None = None) -> Registration:
        """Begin to listen, and return what to register: the address, and the `layout` that others are to know."""
        self._server = await asyncio.start_server(self._answer, self._host, 0)
        port = int(self._server.sockets[0].getsockname()[1])
        role = "+".join(
            role for role, there in (("member", self._member), ("source", self._source)) if there is not None
        )
        return Registration(name=self.name, role=role, host=self._host, port=port, layout=layout or {})

    async def join(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = 60.0,
        layout: dict[str, str | int | float] | None = None,
    ) -> None:
        """Register at the store of a manager and wait until it calls; from then on register again whenever it is lost.

        Raises:
            TransferError: no store answers, or no manager called, within `timeout_s`.
        """
        registration = await self.start(layout=layout)
        try:
            async with asyncio.timeout(timeout_s):
                await self._register_until_called(host, port, registration)
        except TimeoutError:
            await self.close()
            raise TransferError(
                f"{self.name} registered at {host}:{port}, but no manager called within {timeout_s:g} s; does it run "
                "there, with the same secret?"
            ) from None
        self._spawn(self._stay_registered(host, port, registration), "stay registered")

    async def leave(self) -> None:
        """Go: tell the manager, so that it counts on this member no more, and close."""
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed):
                await self._channel.send({"event": "leave"})
        await self.close()

    async def close(self) -> None:
        """Listen no more, hang up, give up what is open."""
        if self._server is not None:
            self._server.close()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        await self._give_up()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()

    async def _register_until_called(self, host: str, port: int, registration: Registration) -> None:
        while not self.has_manager:
            self._called.clear()
            try:
                await register(host, port, registration, self._secret)
            except TransferError as error:
                _log.debug("%s cannot register yet: %s", self.name, error)
                await asyncio.sleep(_RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._called.wait(), _HELLO_S)

    async def _stay_registered(self, host: str, port: int, registration: Registration) -> None:
        while True:
            if not self.has_manager:
                await self._register_until_called(host, port, registration)
            await asyncio.sleep(_RETRY_S)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await answer(reader, writer, self._secret, name=self.name, timeout_s=_HELLO_S)
        except SyncError as error:
            _log.warning("%s: %s", self.name, error)
            return
        if self._channel is not None:
            self._channel.close()  # a manager that is there takes the place of one that was
            await self._give_up()
        self._channel = channel
        self._called.set()
        try:
            while True:
                self._spawn(self._handle(channel, await channel.receive()), "request")
        except SyncError as error:
            _log.info("%s: the manager's line ended: %s", self.name, error)
        finally:
            channel.close()
            if self._channel is channel:
                self._channel = None
                await self._give_up()

    async def _handle(self, channel: Channel, request: Json) -> None:
        number = request.get("id")
        try:
            handler = self._ops.get(str(request.get("op")))
            if handler is None:
                raise WireError(f"unknown op {request.get('op')!r}; expected one of {', '.join(self._ops)}")
            reply: Json = {"id": number, "ok": await handler(request)}
        except Exception as error:  # noqa: BLE001 -- sent to the manager, which raises it
            reply = {"id": number, "error": encode_error(error)}
        with contextlib.suppress(ChannelClosed):
            await channel.send(reply)

    async def _ping(self, _request: Json) -> Json:
        return {}

    async def _layouts(self, _request: Json) -> Json:
        member = self._of_member()
        ranks = await member.layouts() if isinstance(member, SlicedMember) else {}
        return {"ranks": {str(rank): encode(Needs(cuts=layout)) for rank, layout in ranks.items()}}

    async def _begin(self, request: Json) -> Json:
        offer = decode(SyncOffer, request.get("offer"))
        held = await self._of_member().begin(offer)
        self._open = offer.sync_id
        self._expect_word_within(float(cast("float", request.get("silent_s", 0))))
        return {"held": held or ""}

    async def _transfer(self, request: Json) -> Json:
        echoes = await self._of_member().transfer(decode(SyncOffer, request.get("offer")))
        return {"echoes": [encode(echo) for echo in echoes]}

    async def _verify(self, request: Json) -> Json:
        member = self._of_member()
        if isinstance(member, CommittingMember):
            await member.verify(decode(SyncOffer, request.get("offer")), decode(Sent, request.get("sent")))
        return {}

    async def _flip(self, request: Json) -> Json:
        offer, sent = decode(SyncOffer, request.get("offer")), decode(Sent, request.get("sent"))
        return {"flip": encode(await self._of_member().flip(offer, sent))}

    async def _commit(self, request: Json) -> Json:
        member, label = self._of_member(), decode(Label, request.get("label"))
        stands = await member.commit(label) if isinstance(member, CommittingMember) else label
        self._over()
        return {"label": encode(stands)}

    async def _abort(self, request: Json) -> Json:
        version = await self._of_member().abort(str(request.get("sync_id")))
        self._over()
        return {"version": version}

    async def _status(self, _request: Json) -> Json:
        member = self._of_member()
        if not isinstance(member, SupervisedMember):
            raise WireError(f"{self.name} has no status")
        return {"status": encode(await member.status())}

    async def _fence(self, request: Json) -> Json:
        member = self._of_member()
        if isinstance(member, SupervisedMember):
            await member.fence(str(request.get("reason")))
        return {}

    async def _canary(self, _request: Json) -> Json:
        side = self._source if self._member is None else self._member
        return {"values": await side.canary() if isinstance(side, CanaryMember) else []}

    async def _offer(self, request: Json) -> Json:
        members = [str(name) for name in cast("list[object]", request.get("members"))]
        offer = await self._of_source().offer(int(cast("int", request.get("version"))), members)
        self._sending = offer.sync_id
        return {"offer": encode(offer)}

    async def _send(self, request: Json) -> Json:
        return {"sent": encode(await self._of_source().send(decode(SyncOffer, request.get("offer"))))}

    async def _abort_send(self, request: Json) -> Json:
        await self._of_source().abort(str(request.get("sync_id")))
        return {}

    def _of_member(self) -> Member:
        if self._member is None:
            raise WireError(f"{self.name} is no member")
        return self._member

    def _of_source(self) -> Source:
        if self._source is None:
            raise WireError(f"{self.name} is no source")
        return self._source

    def _expect_word_within(self, silent_s: float) -> None:
        self._over(keep=self._open)
        if silent_s > 0:
            loop = asyncio.get_running_loop()
            self._silence = loop.call_later(silent_s, lambda: self._spawn(self._give_up(), "silence"))

    def _over(self, *, keep: str = "") -> None:
        self._open = keep
        if self._silence is not None:
            self._silence.cancel()
        self._silence = None

    async def _give_up(self) -> None:
        """Drop what is open: nobody will go on with it."""
        sync_id, sending = self._open, self._sending
        self._over()
        self._sending = ""
        try:
            if self._source is not None and sending:
                await self._source.abort(sending)
            if self._member is not None and sync_id:
                await self._member.abort(sync_id)
        except SyncError as error:
            _log.warning("%s could not give up sync %s: %s", self.name, sync_id, error)

    def _spawn(self, work: Awaitable[None], what: str) -> None:
        task = asyncio.ensure_future(work)
        task.set_name(f"{self.name}: {what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
