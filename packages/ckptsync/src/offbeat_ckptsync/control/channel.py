"""A line between two processes that share a secret: authenticated JSON frames over TCP. No pickle, no encryption.

Frames and proofs are those of docs/sync-protocol.md, section 6 ("Opening"). Neither side sends more to one whose proof is wrong; it
hangs up. The code of a frame covers who sent it and its number, so that none can be forged, changed, repeated, left out or sent
back.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import TYPE_CHECKING, cast

from offbeat_ckptsync.errors import SyncError, TransferError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_ckptsync.toolkit.wire import Json
    from offbeat_ckptsync.values import Registration

PROTOCOL = "offbeat-sync/1"
MAX_FRAME_BYTES = 64 << 20
"""A manifest takes about 100 bytes per tensor, so this is enough for some 600,000 tensors."""

_MAX_HELLO_BYTES = 4096  # of somebody who has not proved anything yet
_MAC_BYTES = 32
_NO_MAC = bytes(_MAC_BYTES)


class ChannelClosed(TransferError):
    """The other side hung up or died."""


class Channel:
    """One end of an open line. `send` may be called by several tasks, `receive` by one."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, is_caller: bool
    ) -> None:
        """Take over a connection whose sides have proved themselves; use `dial` and `answer`."""
        self._reader = reader
        self._writer = writer
        self._key = key
        self._mine, self._theirs = (b"caller:", b"called:") if is_caller else (b"called:", b"caller:")
        self._num_sent = self._num_received = 0

    async def send(self, message: Json) -> None:
        """Send a message; raises `ChannelClosed` where nobody is there any more, `WireError` where it is too large for a frame."""
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_FRAME_BYTES:  # before it has a number: the next message has it then
            raise WireError(
                f"a message of {len(body)} bytes is larger than a frame may be ({MAX_FRAME_BYTES})"
            )
        mac = self._mac(self._mine, self._num_sent, body)
        self._num_sent += 1
        await _write(self._writer, mac, body)

    async def receive(self) -> Json:
        """Return the next message.

        Raises:
            ChannelClosed: the other side hung up or died.
            WireError: a frame is not what the other side sent; the line is not used again.
        """
        mac, body = await _read(self._reader, MAX_FRAME_BYTES)
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._num_received, body)):
            self.close()
            raise WireError("a frame does not carry the sender's code: it was changed on the way; hung up")
        self._num_received += 1
        return _object(body)

    def close(self) -> None:
        """Hang up; harmless to repeat."""
        self._writer.close()

    def _mac(self, side: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, side + struct.pack(">Q", number) + body, hashlib.sha256)


async def dial(host: str, port: int, secret: str, *, name: str, timeout_s: float) -> Channel:
    """Call `name` at `host`:`port`; both sides prove that they know `secret`.

    Raises:
        TransferError: nobody answers within `timeout_s`, or it does not know the secret, or is called otherwise (a port
            is soon taken by another process when its owner dies).
    """
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            _watch(writer)
            try:
                return await _prove_as_caller(reader, writer, secret.encode(), f"{name} at {where}", name)
            except BaseException:
                writer.close()
                raise
    except TimeoutError:
        raise TransferError(f"no answer from {where} within {timeout_s:g} s") from None
    except OSError as error:
        raise TransferError(f"nobody answers at {where}: {error}") from error


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str, *, name: str, timeout_s: float
) -> Channel:
    """Answer a call as `name`; raises `TransferError` when the caller does not prove in time that it knows `secret`."""
    key, mine = secret.encode(), secrets.token_hex(32)
    _watch(writer)
    try:
        async with asyncio.timeout(timeout_s):
            await _write(writer, _NO_MAC, _body({"protocol": PROTOCOL, "nonce": mine}))
            hello = _object((await _read(reader, _MAX_HELLO_BYTES))[1])
            theirs = _nonce(hello, "the caller")
            if not _is_same(hello.get("proof"), _proof(key, "caller", mine, theirs)):
                raise TransferError("a caller does not know the secret; hung up")
            await _write(
                writer, _NO_MAC, _body({"name": name, "proof": _proof(key, "called", mine, theirs, name)})
            )
    except TimeoutError:
        writer.close()
        raise TransferError(f"a caller did not prove itself within {timeout_s:g} s; hung up") from None
    except BaseException:
        writer.close()
        raise
    return Channel(reader, writer, _session_key(key, mine, theirs), is_caller=False)


class Connection:
    """A line that `dial` opened to one agent, which carries operations (`ops.Call`). Every wait on it ends when the line does."""

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


_WATCH = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 120_000,
}  # s, s, times, ms


def _watch(writer: asyncio.StreamWriter) -> None:
    """Let the line end where the other machine is lost: it hangs up on nobody, and who only listens would wait for ever."""
    line = writer.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, limit in _WATCH.items():
        if hasattr(socket, name):  # as on Linux
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), limit)


async def _prove_as_caller(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, where: str, name: str
) -> Channel:
    theirs = _nonce(_object((await _read(reader, _MAX_HELLO_BYTES))[1]), where)
    mine = secrets.token_hex(32)
    proof = _proof(key, "caller", theirs, mine)
    await _write(writer, _NO_MAC, _body({"protocol": PROTOCOL, "nonce": mine, "proof": proof}))
    try:
        told = _object((await _read(reader, _MAX_HELLO_BYTES))[1])
    except ChannelClosed as closed:
        raise TransferError(
            f"{where} hung up on our proof; is the secret the same on both sides?"
        ) from closed
    actual = str(told.get("name"))
    if not _is_same(told.get("proof"), _proof(key, "called", theirs, mine, actual)):
        raise TransferError(f"{where} does not know the secret; hung up")
    if actual != name:
        raise TransferError(f"{where} is not there any more: {actual} answers; hung up")
    return Channel(reader, writer, _session_key(key, theirs, mine), is_caller=True)


def _nonce(hello: Json, who: str) -> str:
    nonce = hello.get("nonce")
    if hello.get("protocol") != PROTOCOL or not isinstance(nonce, str):
        raise WireError(f"{who} speaks {hello.get('protocol')!r}, expected {PROTOCOL!r}; hung up")
    return nonce


def _proof(secret: bytes, *parts: str) -> str:
    text = ":".join(parts).encode(errors="surrogatepass")  # a stranger's words may hold anything
    return hmac.digest(secret, text, hashlib.sha256).hex()


def _is_same(told: object, proof: str) -> bool:
    return hmac.compare_digest(str(told).encode(errors="surrogatepass"), proof.encode())


def _session_key(secret: bytes, called: str, caller: str) -> bytes:
    return hmac.digest(secret, f"session:{called}:{caller}".encode(), hashlib.sha256)


def _body(message: Json) -> bytes:
    return json.dumps(message).encode()


def _object(body: bytes) -> Json:
    try:
        data: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame holds no JSON: {error}") from error
    if not isinstance(data, dict):
        raise WireError(f"a frame holds {type(data).__name__}, expected an object")
    return cast("Json", data)


async def _write(writer: asyncio.StreamWriter, mac: bytes, body: bytes) -> None:
    # One write, without an await in between: frames of several tasks never mix, and go out in the order of numbers.
    try:
        writer.write(struct.pack(">I", len(body)) + mac + body)
        await writer.drain()
    except (OSError, RuntimeError) as error:
        raise ChannelClosed(f"the other side is gone: {error}") from error


async def _read(reader: asyncio.StreamReader, max_bytes: int) -> tuple[bytes, bytes]:
    try:
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        if size > max_bytes:
            raise WireError(f"a frame of {size} bytes came; at most {max_bytes} are taken")
        return await reader.readexactly(_MAC_BYTES), await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ChannelClosed("the other side hung up or died") from error
