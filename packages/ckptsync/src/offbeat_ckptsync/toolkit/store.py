"""A small key-value store over TCP for rendezvous and control mail, at which one can wait for a key.

Not torch's TCPStore: at every connection that one asks the name server what the other address is called, and both sides stand
still for as long as it says nothing (five seconds by default). What goes over the line is in docs/sync-protocol.md, section 6. One
connection asks one thing at a time. Nobody is asked who he is: what a text proves is its reader's business.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable


class Store:
    """One end of a store: `serve` makes the one that holds it, `join` others."""

    def __init__(self, texts: _Table | _Far, host: str, port: int, end: Callable[[], None]) -> None:
        self._texts = texts
        self._end = weakref.finalize(self, end)
        self.host = host
        self.port = port

    @classmethod
    def serve(cls, host: str, port: int = 0, *, on_set: Callable[[], None] | None = None) -> Store:
        """Host a store on `port` (0: a free one) of `host`, an address of this machine; nothing else is listened on.

        It ends with this object, or by `close`. `on_set` is called after each text that is set, in any thread.

        Raises:
            TransferError: `host` is no address of this machine, or the port is taken.
        """
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            raise TransferError(
                f"cannot listen on {host}:{port}: {error}; `host` must be an address of this machine, the port free"
            ) from error
        table = _Table(on_set)
        store = cls(table, host, int(listener.getsockname()[1]), lambda: table.close(listener))
        threading.Thread(target=_welcome, args=(table, listener), name="store", daemon=True).start()
        return store

    @classmethod
    def join(cls, host: str, port: int, timeout_s: float) -> Store:
        """Connect to a store; raises `TransferError` when nobody answers in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = socket.create_connection((host, port), max(deadline - time.monotonic(), _AGAIN_S))
                break
            except OSError as error:
                if time.monotonic() + _AGAIN_S > deadline:
                    raise TransferError(
                        f"no store answers at {host}:{port} within {timeout_s:g} s: {error}"
                    ) from error
            time.sleep(_AGAIN_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(_Far(line, f"{host}:{port}"), host, port, line.close)

    def close(self) -> None:
        """End this end of the store; one that is served ends for all. Harmless a second time."""
        self._end()

    def set(self, key: str, text: str) -> None:
        """Write `text` under `key`; raises `TransferError`, as all that follow, where the store is gone."""
        self._texts.ask("set", key, text)

    def get(self, key: str, wait_s: float = 0.0) -> str | None:
        """Return what is under `key`, as soon as it is there, or None after `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            text = self._texts.ask("get", key, min(left_s, _EACH_S))
            if text is not None or left_s <= _EACH_S:
                return cast("str | None", text)

    def delete(self, key: str) -> None:
        """Forget `key`; harmless when it is not there."""
        self._texts.ask("delete", key)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`."""
        return cast("list[str]", self._texts.ask("keys", prefix))

    def clear(self, keep: str = "") -> None:
        """Forget every key that does not begin with `keep`, with "" all."""
        for key in self.keys():
            if not (keep and key.startswith(keep)):
                self.delete(key)


class _Table:
    """What a store holds, in the process that serves it."""

    def __init__(self, on_set: Callable[[], None] | None) -> None:
        self._on_set = on_set
        self._lock = threading.Lock()
        self._texts: dict[str, str] = {}
        self._num_chars = 0  # of keys and texts
        self._waiting: dict[str, list[threading.Event]] = {}
        self._lines: set[socket.socket] | None = set()  # None: closed

    def ask(self, op: str, key: str, *more: object) -> object:
        match op, more:
            case "set", (str(text),):
                self._set(key, text)
            case "get", (int() | float() as wait_s,):
                return self._get(key, wait_s)
            case "delete", ():
                with self._lock:
                    if (text := self._texts.pop(key, None)) is not None:
                        self._num_chars -= len(key) + len(text)
            case "keys", ():
                with self._lock:
                    return [each for each in self._texts if each.startswith(key)]
            case _:
                raise ValueError(f"no request: {op!r} with {len(more)} arguments")
        return None

    def _set(self, key: str, text: str) -> None:
        with self._lock:
            num_chars = self._num_chars + len(key) + len(text)
            if key in self._texts:
                num_chars -= len(key) + len(self._texts[key])
            if num_chars > _MAX_HELD_CHARS:
                raise TransferError(
                    f"the store keeps at most {_MAX_HELD_CHARS} characters, and {key[:80]!r} would make it {num_chars}"
                )
            self._num_chars = num_chars
            self._texts[key] = text
            waiting = self._waiting.pop(key, [])
        for event in waiting:
            event.set()
        if self._on_set is not None:
            self._on_set()

    def _get(self, key: str, wait_s: float) -> str | None:
        with self._lock:
            if key in self._texts or wait_s <= 0:
                return self._texts.get(key)
            event = threading.Event()
            self._waiting.setdefault(key, []).append(event)
        event.wait(min(_EACH_S, wait_s))  # who asks for longer may be long gone
        with self._lock:
            others = [each for each in self._waiting.pop(key, []) if each is not event]
            if others:
                self._waiting[key] = others
            return self._texts.get(key)

    def serve(self, line: socket.socket) -> None:
        """Answer one connection until it ends; who asks otherwise than he should is hung up on."""
        with line:
            try:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:
                    op, key, *more = cast("list[object]", _receive(line))
                    _send(line, self.ask(str(op), str(key), *more))
            except (OSError, ValueError, TypeError, TransferError, RecursionError):
                return
            finally:
                self.drop(line)

    def close(self, listener: socket.socket) -> None:
        with self._lock:
            lines, self._lines = self._lines, None
        for each in (listener, *(lines or ())):
            try:
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits at it, which closes it
            except OSError:
                continue  # it was quicker

    @property
    def is_closed(self) -> bool:
        return self._lines is None

    def keep(self, line: socket.socket) -> bool:
        """Count a connection among those that are closed with the store; False where there are too many, or it is closed."""
        with self._lock:
            if self._lines is None or len(self._lines) >= _MAX_LINES:
                return False
            self._lines.add(line)
            return True

    def drop(self, line: socket.socket) -> None:
        """Count it no more."""
        with self._lock:
            if self._lines is not None:
                self._lines.discard(line)


def _welcome(table: _Table, listener: socket.socket) -> None:
    with listener:
        while True:
            try:
                line, _ = listener.accept()
            except ConnectionError:
                continue  # who called has gone
            except OSError:
                if table.is_closed:
                    return
                time.sleep(_AGAIN_S)  # as many files are open as may be; who called waits
                continue
            try:
                if not table.keep(line):
                    raise RuntimeError("too many lines")
                threading.Thread(target=table.serve, args=(line,), name="store line", daemon=True).start()
            except RuntimeError:  # this process may start no more threads, or there are too many lines
                table.drop(line)
                line.close()
                time.sleep(_AGAIN_S)


class _Far:
    """A store that is served elsewhere."""

    def __init__(self, line: socket.socket, where: str) -> None:
        self._line = line
        self._where = where
        self._lock = threading.Lock()

    def ask(self, op: str, key: str, *more: object) -> object:
        wait_s = cast("float", more[0]) if op == "get" else 0.0
        with self._lock:
            try:
                self._line.settimeout(wait_s + _EACH_S)
                _send(self._line, [op, key, *more])
                return _receive(self._line)
            except (OSError, ValueError) as error:
                self._line.close()  # an answer that comes late would be taken for the next one's
                raise TransferError(f"the store at {self._where} is gone: {error}") from error


def _send(line: socket.socket, value: object) -> None:
    data = json.dumps(value).encode()
    line.sendall(struct.pack(">I", len(data)) + data)


def _receive(line: socket.socket) -> object:
    (length,) = struct.unpack(">I", _exactly(line, 4))
    if length > _MAX_BYTES:
        raise ValueError(f"{length} bytes at once, {_MAX_BYTES} are allowed")
    return json.loads(_exactly(line, length))


def _exactly(line: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = line.recv(num_bytes - len(parts))
        if not part:
            raise ConnectionError("the other side hung up")
        parts += part
    return bytes(parts)


def is_loopback(host: str) -> bool:
    """Say whether `host`, a name or an address, leads every machine to itself; so does 0.0.0.0."""
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost"


def own_address(host: str, port: int) -> str:
    """Return the address of this machine from which `host` is reached; `host` itself where that is this machine's."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing: the kernel only chooses the way
        return str(probe.getsockname()[0])


_EACH_S = 30.0  # one request to a store that answers takes microseconds, beside what it waits for
_AGAIN_S = 0.05
_MAX_BYTES = 64 << 20
_MAX_HELD_CHARS = 256 << 20
_MAX_LINES = 4096
