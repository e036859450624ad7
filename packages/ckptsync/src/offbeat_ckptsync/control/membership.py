"""Who takes part: members and sources write their address to a store, the manager calls them (docs/sync-protocol.md, section 6).

The line then proves both sides (see `channel`), so a registration that somebody repeats leads nowhere. Who loses its manager
registers again. The store asks nobody for the secret: nothing here counts or waits for what a stranger may have written.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import threading
import time
import uuid
from typing import TYPE_CHECKING

from offbeat_ckptsync.control.carried import CarriedMember, CarriedSource
from offbeat_ckptsync.control.channel import Connection, dial
from offbeat_ckptsync.errors import (
    LoadError,
    ManifestError,
    SyncError,
    SyncFailed,
    TransferError,
    VersionError,
)
from offbeat_ckptsync.toolkit.store import Store
from offbeat_ckptsync.toolkit.threads import in_thread
from offbeat_ckptsync.toolkit.wire import Json, decode, encode
from offbeat_ckptsync.values import Registration

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from offbeat_ckptsync.control.manager import CheckpointEngineManager
    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_ckptsync.toolkit.ops import Call

_log = logging.getLogger(__name__)
_CHANGED = "offbeat/members"
_EACH = "offbeat/member/"
_POLL_S = 0.02
_LOOK_S = 5.0
_RETRY_S, _RARELY_S = 1.0, 60.0
_FOR_GOOD = (
    LoadError,
    ManifestError,
    VersionError,
)  # broken, takes other tensors, or serves another content as this version
_JOIN_S = 10.0
_PING_S = 2.0


async def register(host: str, port: int, registration: Registration, secret: str) -> None:
    """Write `registration` to the store at `host`:`port`; raises `TransferError` where none answers."""

    def write() -> None:
        store = Store.join(host, port, _JOIN_S)
        turn = uuid.uuid4().hex
        store.set(_EACH + registration.name, json.dumps({**_signed(registration, secret), "turn": turn}))
        store.set(_CHANGED, turn)  # after it: whoever sees this word finds the registration

    await in_thread(write, name=f"register {registration.name}")


class Membership:
    """Finds agents at a store and keeps a line to each; once it has a manager, joiners catch up and leavers are forgotten."""

    def __init__(self, store: Store, secret: str, config: SyncConfig) -> None:
        """Look for registrations at `store`; raises `ValueError` without a secret."""
        if not secret:
            raise ValueError("`secret` is empty: anybody could join; share a random one")
        self._store = store
        self._owns_store = False
        self._secret = secret
        self._config = config
        self._changed: str | None = None  # the word that was there when registrations were last read
        self._read: dict[str, str] = {}  # the last text of each
        self._connections: dict[str, Connection] = {}
        self._manager: CheckpointEngineManager | None = None
        self._peers_only = False
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.refused: dict[str, str] = {}
        self._watch: asyncio.Task[None] | None = None
        self._is_closed = threading.Event()
        self._trouble = ""  # why registrations cannot be read now

    @classmethod
    def serve(cls, secret: str, config: SyncConfig, *, port: int = 0) -> Membership:
        """Host the store on `config.host`, loopback unless told otherwise; `port` 0 means any."""
        membership = cls(Store.serve(config.host, port), secret, config)
        membership._owns_store = True
        return membership

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store: what agents `join`."""
        return self._store.host, self._store.port

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
                f"{', '.join(self._connections) or 'nobody'}{f'; {self._trouble}' if self._trouble else ''}"
            ) from None

    def source(self, name: str) -> CarriedSource:
        """Return the source called `name`, whoever that is at the time it is asked."""

        def find() -> Call:
            if name not in self._connections:
                raise TransferError(f"source {name} is not here; start it, it registers itself")
            return self._connections[name].call

        return CarriedSource(find)

    def attach(self, manager: CheckpointEngineManager, *, peers_only: bool | None = None) -> None:
        """Bring all members here, and all that come, to what `manager` has committed, and keep its list.

        With `peers_only` joiners get it from other members, or come with the next sync. That is the default where gathering is
        collective (`WeightSource.collective`): a joiner comes at a moment when the other ranks do something else.
        """
        self._manager = manager
        self._peers_only = manager.source.collective if peers_only is None else peers_only
        for connection in self._connections.values():
            self._welcome(connection)

    async def fenced(self, name: str, reason: str) -> None:
        """Hang up on a member that was fenced off: if it lives it registers again and catches up. The manager's `on_fence`."""
        _log.warning("%r is fenced off: %s", name, reason)
        if name in self._connections:
            self._connections[name].close()

    async def close(self) -> None:
        """Hang up on everybody."""
        self._is_closed.set()
        tasks = [*self._tasks.values()] + ([self._watch] if self._watch is not None else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._connections.values()):
            connection.close()
        if self._owns_store:
            self._store.close()

    def _missing(self, names: list[str]) -> list[str]:
        def is_here(name: str) -> bool:
            connection = self._connections.get(name)
            if connection is None:
                return False
            if self._manager is None or "member" not in connection.registration.role:
                return True
            return name in self._manager.members

        return [name for name in names if not is_here(name)]

    async def _look(self) -> None:
        """Call whoever registers, for as long as this membership is there; a store that fails is asked again."""
        while True:
            try:
                registered = await in_thread(self._read_new, name="membership")
            except Exception as error:  # noqa: BLE001 -- told to who waits; without this loop nobody could join any more
                if not self._trouble:
                    _log.warning("the store of the members fails, asking on: %s", error)
                self._trouble = f"the store at {self._store.host}:{self._store.port} fails: {error}"
                await asyncio.sleep(_RETRY_S)
                continue
            self._trouble = ""
            for registration in registered:
                self._start("call", registration.name, self._call(registration))

    def _read_new(self) -> list[Registration]:
        """Wait until somebody has registered, a few seconds at most, and return what is new. Blocks."""
        until = time.monotonic() + _LOOK_S
        new: list[Registration] = []
        while not new and not self._is_closed.wait(_POLL_S) and time.monotonic() < until:
            word = self._store.get(_CHANGED)
            if word == self._changed:
                continue
            self._changed = word  # before reading: who comes meanwhile sets another one
            for key in self._store.keys(_EACH):
                text = self._store.get(key)
                if text is None or text == self._read.get(key):
                    continue
                self._read[key] = text
                if (registration := self._checked(text)) is not None:
                    new.append(registration)
        return new

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
        except (SyncError, ValueError, AttributeError, RecursionError) as error:
            _log.warning("a registration that is none: %s", error)
            return None
        if not good:
            _log.warning("%r registered without the secret; not called", registration.name)
            self.refused[registration.name] = "it does not know the secret"
        return registration if good else None

    async def _call(self, registration: Registration) -> None:
        name = registration.name
        if (there := await self._on_the_line(name)) is not None:
            if there != registration:  # else it registered a moment before it was called
                self.refused[name] = (
                    f"two processes call themselves {name!r}: the one at {there.host}:{there.port} is on the line, the one at "
                    f"{registration.host}:{registration.port} is not called; give each a name of its own"
                )
                _log.warning("%s", self.refused[name])
            return
        try:
            limit_s = self._config.begin_timeout_s
            channel = await dial(
                registration.host, registration.port, self._secret, name=name, timeout_s=limit_s
            )
        except SyncError as error:
            self.refused[name] = str(error)  # most often: it registered with a manager before us, and is gone
            return
        connection = Connection(registration, channel, self._ended)
        if (before := self._connections.get(name)) is not None:
            before.close()
        self.refused.pop(name, None)
        self._connections[name] = connection
        self._welcome(connection)

    async def _on_the_line(self, name: str) -> Registration | None:
        """Return who is on the line under this name and answers."""
        connection = self._connections.get(name)
        if connection is None:
            return None
        try:
            async with asyncio.timeout(_PING_S):
                await connection.call("ping", {})
        except (SyncError, TimeoutError):
            return None
        return connection.registration

    def _welcome(self, connection: Connection) -> None:
        if self._manager is not None and "member" in connection.registration.role:
            self._start("admit", connection.name, self._admit(self._manager, connection))

    async def _admit(self, manager: CheckpointEngineManager, connection: Connection) -> None:
        name = connection.name
        manager.remove(name)  # of a line before this one
        member = CarriedMember(connection.registration, connection.call)
        pause_s = _RETRY_S
        while self._connections.get(name) is connection:
            try:
                await manager.catch_up(member, peers_only=self._peers_only)
            except Exception as error:  # noqa: BLE001 -- told to who waits for it
                self.refused[name] = str(error) if isinstance(error, SyncError) else repr(error)
                _log.warning("%r did not catch up: %s", name, error)
                if self._connections.get(name) is not connection:
                    return
                cause = error.__cause__
                is_lacking = isinstance(cause, (VersionError, TransferError)) or (
                    self._peers_only and cause is None
                )
                if isinstance(error, SyncFailed) and is_lacking:
                    # Where nobody holds the committed weights any more, it gets with the next sync what the others get.
                    manager.enlist(member)
                    return
                if any(isinstance(each, _FOR_GOOD) for each in (error, cause)):
                    return  # it would fail that sync too: it stays on the line and gets nothing
                await asyncio.sleep(pause_s)  # it may be busy: with a flip for which it was fenced off, say
                pause_s = min(2 * pause_s, _RARELY_S)
            else:
                self.refused.pop(name, None)
                if self._connections.get(name) is not connection:
                    manager.remove(name)  # it went while it caught up
                return

    def _ended(self, connection: Connection, _why: str) -> None:
        if self._connections.get(connection.name) is not connection:
            return
        del self._connections[connection.name]
        if self._manager is not None:
            self._manager.remove(connection.name)


def _signed(registration: Registration, secret: str) -> Json:
    row = encode(registration)
    canonical = json.dumps(row, sort_keys=True, separators=(",", ":"))
    return {
        "registration": row,
        "proof": hmac.digest(secret.encode(), canonical.encode(), hashlib.sha256).hex(),
    }
