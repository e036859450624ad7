"""Who takes part: members and sources write their address and layout to a TCPStore, the manager calls them.

A registration is a JSON object {"registration": {name, role, host, port, layout}, "proof": HMAC-SHA256(secret,
canonical JSON of the registration), in hex}. The n-th lies under "offbeat/member/<n>", n counted from 1 by "offbeat/members"
(the store's atomic add). The manager reads each once, drops those with a wrong proof, and calls the address; the line then proves
both sides (see `channel`), so a registration that somebody repeats leads nowhere. Who loses its manager registers again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from typing import TYPE_CHECKING

from offbeat_ckptsync.errors import SyncError, TransferError, VersionError
from offbeat_ckptsync.network.remote import Peer, RemoteMember, RemoteSource
from offbeat_ckptsync.store import Store
from offbeat_ckptsync.threads import in_thread
from offbeat_ckptsync.values import Registration
from offbeat_ckptsync.wire import Json, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from offbeat_ckptsync.config import SyncConfig
    from offbeat_ckptsync.control.manager import CheckpointEngineManager

_log = logging.getLogger(__name__)
_COUNT = "offbeat/members"
_EACH = "offbeat/member/{}"
_POLL_S = 0.02
_HOLE_S = 3.0  # between counting a registration and writing it
_JOIN_S = 10.0
_PING_S = 2.0


async def register(host: str, port: int, registration: Registration, secret: str) -> None:
    """Write `registration` to the store at `host`:`port`; raises `TransferError` where none answers."""

    def write() -> None:
        try:
            store = Store.join(host, port, _JOIN_S)
            number = store.raw.add(_COUNT, 1)
            store.set(_EACH.format(number), json.dumps(_signed(registration, secret)))
        except RuntimeError as error:  # torch's: the store went away in between
            raise TransferError(f"the store at {host}:{port} is gone: {error}") from error

    await in_thread(write, name=f"register {registration.name}")


class Membership:
    """Finds agents at a store and keeps a line to each; once it has a manager, joiners catch up and leavers are forgotten."""

    def __init__(
        self,
        store: Store,
        secret: str,
        config: SyncConfig,
        *,
        on_leave: Callable[[str, str], None] | None = None,
    ) -> None:
        """Look for registrations at `store`; `on_leave` is called with the name of a peer whose line ended, and why.

        Raises:
            ValueError: there is no secret.
        """
        if not secret:
            raise ValueError("`secret` is empty: anybody could join; share a random one")
        self._store = store
        self._secret = secret
        self._config = config
        self._on_leave = on_leave
        self._num_read = 0
        self._hole = (0, 0.0)  # a number that was taken and has no text yet, and since when
        self._peers: dict[str, Peer] = {}
        self._manager: CheckpointEngineManager | None = None
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.refused: dict[str, str] = {}
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    def serve(cls, secret: str, config: SyncConfig, *, port: int = 0) -> Membership:
        """Host the store on `config.host`, loopback unless told otherwise; `port` 0 means any."""
        return cls(Store.serve(config.host, port), secret, config)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store: what agents `join`."""
        return self._store.host, self._store.port

    @property
    def peers(self) -> dict[str, Registration]:
        """Who is on the line, by name."""
        return {name: peer.registration for name, peer in self._peers.items()}

    async def start(self) -> None:
        """Begin to look for registrations."""
        self._watch = asyncio.create_task(self._look(), name="membership")

    async def wait_for(self, names: list[str], timeout_s: float) -> None:
        """Wait until all `names` are on the line; with a manager, members also until they have caught up.

        Raises:
            TransferError: not all came within `timeout_s`; names who is missing, and why where that is known.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._missing(names):  # noqa: ASYNC110 -- what is missing changes in many places
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            missing = [
                f"{name} ({self.refused[name]})" if name in self.refused else name
                for name in self._missing(names)
            ]
            raise TransferError(
                f"rendezvous: missing after {timeout_s:g} s: {', '.join(missing)}; here: "
                f"{', '.join(self._peers) or 'nobody'}"
            ) from None

    def source(self, name: str) -> RemoteSource:
        """Return the source called `name`, whoever that is at the time it is asked."""

        def find() -> Peer:
            if name not in self._peers:
                raise TransferError(f"source {name} is not here; start it, it registers itself")
            return self._peers[name]

        return RemoteSource(find)

    def attach(self, manager: CheckpointEngineManager) -> None:
        """Bring all members here, and all that come, to what `manager` has committed, and keep its list."""
        self._manager = manager
        for peer in self._peers.values():
            self._welcome(peer)

    async def fenced(self, name: str, reason: str) -> None:
        """Hang up on a member that was fenced off: if it lives it registers again and catches up. The manager's `on_fence`."""
        _log.warning("%s is fenced off: %s", name, reason)
        if name in self._peers:
            self._peers[name].close()

    async def close(self) -> None:
        """Hang up on everybody."""
        tasks = [*self._tasks.values()] + ([self._watch] if self._watch is not None else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in list(self._peers.values()):
            peer.close()

    def _missing(self, names: list[str]) -> list[str]:
        def is_here(name: str) -> bool:
            peer = self._peers.get(name)
            if peer is None:
                return False
            if self._manager is None or "member" not in peer.registration.role:
                return True
            return name in self._manager.members

        return [name for name in names if not is_here(name)]

    async def _look(self) -> None:
        while True:
            count = await in_thread(lambda: self._store.raw.add(_COUNT, 0), name="count members")
            latest: dict[str, Registration] = {}
            for number in range(self._num_read + 1, count + 1):
                text = await in_thread(lambda n=number: self._store.get(_EACH.format(n)), name="read member")
                if text is None and not self._is_given_up(number):
                    break  # counted, but not yet written
                self._num_read = number
                if text is not None and (registration := self._checked(text)) is not None:
                    latest[registration.name] = registration
            for registration in latest.values():
                self._start("call", registration.name, self._call(registration))
            await asyncio.sleep(_POLL_S)

    def _is_given_up(self, number: int) -> bool:
        """Say whether who took `number` has had its time to write: it died in between, and must not hold up the others."""
        found, since = self._hole
        if found != number:
            self._hole = (number, time.monotonic())
            return False
        return time.monotonic() - since > _HOLE_S

    def _start(self, what: str, name: str, work: Coroutine[object, object, None]) -> None:
        """Run `work` in a task that takes the place of the one before it for the same name."""
        if (before := self._tasks.get((what, name))) is not None:
            before.cancel()
        self._tasks[what, name] = asyncio.create_task(work, name=f"{what} {name}")

    def _checked(self, text: str) -> Registration | None:
        try:
            told: Json = json.loads(text)
            registration = decode(Registration, told.get("registration"))
            signed = str(_signed(registration, self._secret)["proof"])
            good = hmac.compare_digest(str(told.get("proof")).encode(), signed.encode())
        except (SyncError, ValueError, AttributeError) as error:
            _log.warning("a registration that is none: %s", error)
            return None
        if not good:
            _log.warning("%s registered without the secret; not called", registration.name)
            self.refused[registration.name] = "it does not know the secret"
        return registration if good else None

    async def _call(self, registration: Registration) -> None:
        name = registration.name
        if await self._is_on_the_line(registration):
            return  # it registered a moment before it was called
        try:
            peer = await Peer.call(registration, self._secret, self._config.begin_timeout_s, self._ended)
        except SyncError as error:
            self.refused[name] = str(
                error
            )  # most often one that registered with a manager before us, and is gone
            return
        if (before := self._peers.pop(name, None)) is not None:
            before.close()
        self.refused.pop(name, None)
        self._peers[name] = peer
        self._welcome(peer)

    async def _is_on_the_line(self, registration: Registration) -> bool:
        peer = self._peers.get(registration.name)
        if peer is None or peer.registration != registration:
            return False
        try:
            async with asyncio.timeout(_PING_S):
                await peer.ask("ping")
        except (SyncError, TimeoutError):
            return False
        return True

    def _welcome(self, peer: Peer) -> None:
        if self._manager is not None and "member" in peer.registration.role:
            self._start("admit", peer.name, self._admit(self._manager, peer))

    async def _admit(self, manager: CheckpointEngineManager, peer: Peer) -> None:
        manager.remove(peer.name)  # of a line before this one
        member = RemoteMember(peer, self._config)
        try:
            await manager.catch_up(member)
        except SyncError as error:
            self.refused[peer.name] = str(error)
            _log.warning("%s did not catch up: %s", peer.name, error)
            # Where nobody holds the committed weights any more, it gets with the next sync what the others get. One
            # that is broken or takes other tensors would fail that sync too: it stays on the line and gets nothing.
            cause = error.__cause__
            if isinstance(cause, (VersionError, TransferError)) and self._peers.get(peer.name) is peer:
                manager.enlist(member)
        else:
            self.refused.pop(peer.name, None)
            if self._peers.get(peer.name) is not peer:
                manager.remove(peer.name)  # it went while it caught up

    def _ended(self, peer: Peer, why: str) -> None:
        if self._peers.get(peer.name) is not peer:
            return
        del self._peers[peer.name]
        if self._manager is not None:
            self._manager.remove(peer.name)
        if self._on_leave is not None:
            self._on_leave(peer.name, why)


def _signed(registration: Registration, secret: str) -> Json:
    row = encode(registration)
    canonical = json.dumps(row, sort_keys=True, separators=(",", ":"))
    return {
        "registration": row,
        "proof": hmac.digest(secret.encode(), canonical.encode(), hashlib.sha256).hex(),
    }
