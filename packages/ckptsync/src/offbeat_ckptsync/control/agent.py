"""The end of a member, or of a source, that a manager elsewhere calls: it registers itself and does what it is asked.

Requests are done side by side, so that `abort` overtakes a `transfer` that hangs. The agent says that it leaves before it goes of
its own will. It gives up an open sync when the line breaks, and when the manager is silent for the offer's `silent_s` after
`begin`; what was flipped stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.control.carried import Operations
from offbeat_ckptsync.control.channel import Channel, ChannelClosed, answer
from offbeat_ckptsync.control.members import AskCanary, local_member
from offbeat_ckptsync.control.membership import register
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.toolkit.ops import failure
from offbeat_ckptsync.toolkit.store import own_address
from offbeat_ckptsync.toolkit.threads import in_thread
from offbeat_ckptsync.values import Registration

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from offbeat_ckptsync.ends.receiver import Receiver
    from offbeat_ckptsync.seams import GenerationGate, Member, Source
    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_ckptsync.toolkit.wire import Json

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
        host: str = "",
    ) -> None:
        """Answer only those who know `secret`; listen on `host`, by default the address from which the manager is reached.

        Raises:
            ValueError: there is nothing to serve, or no secret.
        """
        if member is None and source is None:
            raise ValueError("an agent serves a member or a source; give it one")
        if not secret:
            raise ValueError("`secret` is empty: anybody could give this member weights; share a random one")
        self.name = name
        self._secret = secret
        self._operations = Operations(name, member=member, source=source)
        self._host = host
        self._server: asyncio.Server | None = None
        self._channel: Channel | None = None
        self._called = asyncio.Event()
        self._open: str = ""  # the sync that is open at the member
        self._sending: str = ""  # the sync that is open at the source
        self._silence: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._callers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._num_refused = 0

    @property
    def has_manager(self) -> bool:
        """Say whether a manager is on the line."""
        return self._channel is not None

    async def start(self, reached_at: str = "127.0.0.1") -> Registration:
        """Begin to listen, and return what to register: `host`, or where it is no single address, `reached_at`.

        Raises:
            TransferError: `host` is no address of this machine.
        """
        host = self._host or reached_at
        try:
            self._server = await asyncio.start_server(self._accept, host, 0)
        except OSError as error:
            raise TransferError(
                f"{self.name} cannot listen on {host}: {error}; `host` is an address of its own machine, or left out"
            ) from error
        port = int(self._server.sockets[0].getsockname()[1])
        if host in ("0.0.0.0", "::"):
            host = reached_at
        return Registration(name=self.name, role=self._operations.role, host=host, port=port)

    async def join(self, host: str, port: int, *, timeout_s: float = 60.0) -> None:
        """Register at the store of a manager and wait until it calls; from then on register again whenever it is lost.

        Raises:
            TransferError: no store answers, or no manager called, within `timeout_s`.
        """
        try:
            reached_at = await in_thread(lambda: own_address(host, port), name="own address")
        except OSError as error:
            raise TransferError(
                f"{self.name} knows no way to the manager at {host}:{port}: {error}"
            ) from error
        registration = await self.start(reached_at)
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
        self._channel = None
        for writer in self._callers.values():
            writer.close()
        await self._give_up()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        if self._callers:  # they end with their lines; one that a loop which ends cancels leaves a traceback
            await asyncio.wait(self._callers, timeout=_HELLO_S)

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

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None or not self._server.is_serving():
            writer.close()  # it was on its way in while this agent closed
            return
        # Known from its first moment: `close` may come before the task has begun.
        task = asyncio.create_task(self._answer(reader, writer), name=f"{self.name}: a caller")
        self._callers[task] = writer
        task.add_done_callback(self._callers.pop)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await answer(reader, writer, self._secret, name=self.name, timeout_s=_HELLO_S)
        except SyncError as error:
            self._num_refused += 1
            if self._num_refused.bit_count() == 1:  # at 1, 2, 4 ..: nobody fills the log
                _log.warning("%s refused %d callers; the last: %s", self.name, self._num_refused, error)
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
        number, op = request.get("id"), str(request.get("op"))
        outcome: Json = {"ok": {}} if op == "ping" else await self._operations(op, request)
        if "ok" in outcome:
            await self._done(channel, op, request | cast("Json", outcome["ok"]))
        with contextlib.suppress(ChannelClosed):
            try:
                await channel.send({"id": number, **outcome})
            except (TypeError, ValueError) as error:  # too large, or no JSON: who waits is told
                await channel.send({"id": number, **failure(error)})

    async def _done(self, channel: Channel, op: str, told: Json) -> None:
        """Keep in mind which sync is open, for when nobody goes on with it; where that is so already, give it up."""
        match op:
            case "begin" | "offer" if channel is not self._channel:
                sync_id = str(cast("Json", told["offer"])["sync_id"])
                await self._drop("abort" if op == "begin" else "abort_send", sync_id)
            case "begin":
                offer = cast("Json", told["offer"])
                self._open = str(offer["sync_id"])
                self._expect_word_within(float(cast("float", offer.get("silent_s", 0.0))))
            case "offer":
                self._sending = str(cast("Json", told["offer"])["sync_id"])
            case "send":
                self._sending = ""
            case "commit":
                self._over()
            case "abort" if told["sync_id"] == self._open:
                self._over()
            case _:
                pass

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
        await self._drop("abort_send", sending)
        await self._drop("abort", sync_id)

    async def _drop(self, op: str, sync_id: str) -> None:
        outcome = await self._operations(op, {"sync_id": sync_id}) if sync_id else {}
        if "error" in outcome:
            _log.warning("%s could not give up sync %s: %s", self.name, sync_id, outcome["error"])

    def _spawn(self, work: Awaitable[None], what: str) -> None:
        task = asyncio.ensure_future(work)
        task.set_name(f"{self.name}: {what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def agent_of(
    receiver: Receiver,
    config: SyncConfig,
    secret: str,
    *,
    gate: GenerationGate,
    canary: AskCanary | None = None,
) -> Agent:
    """Return an agent for a replica in this process: it takes weights, and hands its copy on to joiners.

    `gate` keeps requests from weights that change: `LockGate`, or `NO_TRAFFIC` where nothing serves beside the flip.
    """
    member = local_member(receiver, config, gate=gate, canary=canary)
    return Agent(receiver.rank_id.member, secret, member=member)
