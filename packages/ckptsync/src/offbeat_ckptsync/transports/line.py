"""A line between a source and the receiving ranks of its machine: a Unix socket that takes packets and open files.

The source listens in a folder that only its user may enter (0700), so that nobody else can fill its queue. Either side looks
at the other's user id as the kernel tells it, before it reads a byte, and hangs up on anybody else's. Packets are
JSON objects of at most 64 KiB (SOCK_SEQPACKET keeps their borders):

    receiver: {"sync": id, "token": secret of the offer, "member", "rank", "num_ranks", ..}
    source:   {"welcome": ..} or {"error": text}; then what the transport says

A side that dies is noticed at once: the kernel closes its end. The source ends a sync by shutting its sending half, so
that it still sees when a receiver closes.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import json
import os
import secrets
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
import weakref
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from offbeat_ckptsync.ends.buckets import missing_ranks
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.seams import Transport
from offbeat_ckptsync.values import RankId, SyncOffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from offbeat_ckptsync.toolkit.config import SyncConfig

Packet = dict[str, Any]

_MAX_PACKET = 1 << 16
_FOLDER, _RANDOM, _SOCKET = "offbeat-line-", "?" * 8, "socket"
_MAX_FOLDER = 100  # the kernel takes 107 bytes of a path
_YOUNG_S = 60.0  # a folder may not be listened in yet
_TICK_S = 0.02  # how soon a waiting side notices an abort
_AGAIN_S = 0.002
_HELLO_S = 1.0  # a receiver says who it is right after it has connected
_BACKLOG = 128
_ROOM = socket.CMSG_LEN(array.array("i").itemsize)  # for one open file


class Line:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over `sock`, already connected."""
        self._sock = sock

    @classmethod
    def connect(
        cls, address: str, deadline: float, stop: Callable[[], bool] = lambda: False, *, who: str
    ) -> Line:
        """Call the source at `address`; while more call than it can take, call again.

        Raises:
            TransferError: nobody of this user answers there, or `stop()` said so.
        """
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.setblocking(False)  # the kernel answers at once, or says that the queue is full
                sock.connect(address)
                break
            except OSError as error:
                sock.close()
                is_full = isinstance(error, BlockingIOError)
                if is_full and not stop() and time.monotonic() < deadline:
                    time.sleep(_AGAIN_S)
                    continue
                why = (
                    "more call it than it can take"
                    if is_full
                    else "is it on this machine, with the same /tmp?"
                )
                raise TransferError(f"{who} finds no source at {address}: {error}; {why}") from error
        line = cls(sock)
        if (user := line.peer_user()) != os.getuid():
            line.close()
            raise TransferError(f"{who}: the source at {address} is of user {user}, not {os.getuid()}")
        return line

    def peer_user(self) -> int:
        """Return the user id of the process at the other end."""
        size = struct.calcsize("3i")
        return struct.unpack("3i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]

    def send(self, packet: Packet, deadline: float, fd: int | None = None) -> None:
        """Send a packet, with an open file where `fd` names one; raises `OSError` when the other end is gone or full."""
        files = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        room = select.poll()
        room.register(self._sock, select.POLLOUT)
        self._sock.setblocking(False)
        while True:
            try:
                self._sock.sendmsg([json.dumps(packet).encode()], files)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("it takes nothing more") from None
                room.poll(1000 * _TICK_S)  # no longer: of a `hang_up` only who sends anew hears

    def receive(self, deadline: float, stop: Callable[[], bool], what: str) -> tuple[Packet, int | None]:
        """Return the next packet and the open file that came with it, the caller's to close.

        Raises:
            TransferError: it did not come in time, `stop()` said so, or the other end is gone; names `what`.
        """
        while True:
            if stop():
                raise TransferError(f"{what}: the sync was aborted")
            self._sock.settimeout(_TICK_S)
            try:
                # Not `recv_fds`: it forgets its flags (CPython 3.11), and whoever is started from here inherits what came.
                data, more, _, _ = self._sock.recvmsg(_MAX_PACKET, _ROOM, socket.MSG_CMSG_CLOEXEC)
                break
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise TransferError(f"{what}: nothing came in time") from None
            except OSError as error:
                raise TransferError(f"{what}: {error}") from error
        if not data:
            raise TransferError(f"{what}: the other side gave up or died")
        return cast("Packet", json.loads(data)), array.array("i", more[0][2])[0] if more else None

    def is_open(self) -> bool:
        """Say whether the other end is still there; does not wait."""
        self._sock.setblocking(False)
        try:
            while self._sock.recv(_MAX_PACKET):
                pass  # late words of a sync that is over
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def hang_up(self) -> None:
        """Say no more; the other end sees it once it has read everything."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it was quicker

    def close(self) -> None:
        """Close this end."""
        self._sock.close()


class Guest:
    """A receiving rank that came: its line, its rank_id, and what else it said."""

    def __init__(self, line: Line, hello: Packet) -> None:
        """Read the rank_id out of `hello`."""
        self.line = line
        self.hello = hello
        self.rank_id = RankId(
            member=str(hello["member"]), rank=int(hello["rank"]), num_ranks=int(hello["num_ranks"])
        )

    def say(self, packet: Packet, deadline: float, what: str, fd: int | None = None) -> None:
        """Send it a packet, with an open file; raises `TransferError`, with the rank and `what`, where it is gone or full."""
        try:
            self.line.send(packet, deadline, fd)
        except OSError as error:
            raise TransferError(f"{what} did not reach {self.rank_id}: {error}") from error


class Reception:
    """Where the receiving ranks of one machine call."""

    def __init__(self) -> None:
        """Listen in a folder of this user's; what processes that were killed left of theirs is removed."""
        if not hasattr(socket, "SCM_RIGHTS") or not hasattr(os, "memfd_create"):
            raise SyncError("this transport needs Linux; choose `broadcast` or `disk`")
        _remove_left_folders()
        folder = tempfile.mkdtemp(prefix=_FOLDER)
        if len(folder) > _MAX_FOLDER:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix=_FOLDER, dir="/tmp")
        self._name = f"{folder}/{_SOCKET}"
        self._token = secrets.token_hex(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._remove = weakref.finalize(self, _close, self._socket, folder, os.getpid())
        self._socket.bind(self._name)
        self._socket.listen(_BACKLOG)
        self._socket.settimeout(_TICK_S)
        self._came: dict[str, SimpleQueue[Guest]] = {}  # by sync, the latest

    def open(self, sync_id: str) -> dict[str, str | int | float]:
        """Let receivers of `sync_id` call, those of another one no more; return what they need to call here.

        They may call at once: who waits for those of a sync that was given up hands them over.
        """
        if sync_id not in self._came:
            self._forget({sync_id: SimpleQueue()})
        return {"address": self._name, "token": self._token}

    def meet(
        self,
        offer: SyncOffer,
        members: list[str],
        stop: Callable[[], bool],
        rank_ids: Sequence[tuple[str, int]] = (),
    ) -> list[Guest]:
        """Wait until every rank of `members`, and each of `rank_ids`, has called; in order of names and ranks.

        Raises:
            TransferError: someone did not within the offer's `rendezvous_s`, or `stop()` said so; names who is missing.
        """
        timeout_s = float(offer.endpoint["rendezvous_s"])
        deadline = time.monotonic() + timeout_s
        guests: dict[tuple[str, int], Guest] = {}
        callers = self._came.get(offer.sync_id, SimpleQueue[Guest]())
        while missing := [
            *missing_ranks([guest.rank_id for guest in guests.values()], members),
            *_absent(guests, rank_ids),
        ]:
            if stop() or time.monotonic() > deadline:
                for guest in guests.values():
                    guest.line.close()
                cause = "aborted" if stop() else f"no answer within {timeout_s:g} s"
                raise TransferError(
                    f"{offer.transport}: {cause} at the roll call; missing: {', '.join(missing)}"
                )
            if (guest := _next_of(callers)) is None:
                self._answer()
            else:
                guests[guest.rank_id.member, guest.rank_id.rank] = guest
        return [guests[rank_id] for rank_id in sorted(guests)]

    def close(self) -> None:
        """Listen no more."""
        self._forget({})
        self._remove()

    def _forget(self, came: dict[str, SimpleQueue[Guest]]) -> None:
        """Hang up on those whom nobody has met."""
        self._came, before = came, self._came
        for callers in before.values():
            while (guest := _next_of(callers)) is not None:
                guest.line.close()

    def _answer(self) -> None:
        """Take the next call, if one comes within a moment, for whichever sync it is."""
        try:
            sock, _ = self._socket.accept()
        except (TimeoutError, ConnectionError):
            return
        line = Line(sock)
        if line.peer_user() != os.getuid():
            line.close()
            return
        try:
            hello, _ = line.receive(time.monotonic() + _HELLO_S, lambda: False, "hello")
            callers = self._came.get(str(hello["sync"]))
            if callers is not None and hmac.compare_digest(str(hello["token"]), self._token):
                callers.put(Guest(line, hello))
                return
            line.send({"error": f"sync {hello['sync']} is not open here"}, time.monotonic() + _HELLO_S)
        except (TransferError, OSError, KeyError, ValueError, TypeError):
            pass  # whoever this was does not speak this protocol, or is gone
        line.close()


class LineTransport(Transport):
    """What transports over lines have in common: where a source is called, and an end to the waits of a sync given up."""

    def __init__(self, _config: SyncConfig | None = None) -> None:
        """Hold nothing yet."""
        self._lock = threading.Lock()
        self._reception: Reception | None = None
        self._lines: dict[str, list[Line]] = {}  # by sync, the source's ends
        # Kept: a wait of a sync that is over may look only after the next one has begun.
        self._aborted: set[str] = set()

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Listen (once) and say where."""
        with self._lock:
            if self._reception is None:
                self._reception = Reception()
            return self._reception.open(sync_id)

    def meet(
        self, offer: SyncOffer, members: list[str], rank_ids: Sequence[tuple[str, int]] = ()
    ) -> list[Guest]:
        """Wait for the calls of all ranks of `members`, and of `rank_ids`; raises as `Reception.meet`."""
        reception = self._reception
        assert reception is not None, "`open` comes first"
        return reception.meet(offer, members, lambda: self.is_aborted(offer.sync_id), rank_ids)

    def abort(self, sync_id: str) -> None:
        """End the waits of `sync_id` here and hang up on its receivers."""
        with self._lock:
            self._aborted.add(sync_id)
            lines = self._lines.pop(sync_id, [])
        for line in lines:
            line.hang_up()

    def is_aborted(self, sync_id: str) -> bool:
        """Say whether `abort` was called for this sync."""
        return sync_id in self._aborted

    def close(self) -> None:
        """Give up the address."""
        with self._lock:
            if self._reception is not None:
                self._reception.close()
            self._reception = None


def call(
    offer: SyncOffer, rank_id: RankId, about: Packet, stop: Callable[[], bool]
) -> tuple[Line, Packet, int | None]:
    """Call the source of `offer` as `rank_id`, tell it `about`, and return the line, its welcome and the file with it.

    Raises:
        TransferError: it is not there, refused, or did not answer within the offer's `rendezvous_s`.
    """
    who = f"{offer.transport}: {rank_id}"
    deadline = time.monotonic() + float(offer.endpoint["rendezvous_s"])
    line = Line.connect(str(offer.endpoint["address"]), deadline, stop, who=who)
    hello = {"sync": offer.sync_id, "token": offer.endpoint["token"]}
    hello |= {"member": rank_id.member, "rank": rank_id.rank, "num_ranks": rank_id.num_ranks, **about}
    try:
        line.send(hello, deadline)
        answer, fd = line.receive(deadline, stop, f"{who} waits for the source's word")
    except OSError as error:
        line.close()
        raise TransferError(f"{who}: the source hung up: {error}") from error
    except TransferError:
        line.close()
        raise
    if "error" in answer:
        line.close()
        raise TransferError(f"{who} was refused: {answer['error']}")
    return line, answer, fd


def _next_of(callers: SimpleQueue[Guest]) -> Guest | None:
    try:
        return callers.get_nowait()
    except Empty:
        return None


def _absent(guests: dict[tuple[str, int], Guest], rank_ids: Sequence[tuple[str, int]]) -> list[str]:
    return [f"rank {rank} of {member}" for member, rank in rank_ids if (member, rank) not in guests]


def _close(listener: socket.socket, folder: str, pid: int) -> None:
    listener.close()
    if os.getpid() == pid:  # not in a process that was forked off
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left_folders() -> None:
    """Remove folders of this user in which nobody listens any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}{_RANDOM}"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            about = folder.stat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < _YOUNG_S:
                continue
            probe.setblocking(False)
            try:
                probe.connect(str(folder / _SOCKET))
            except (ConnectionRefusedError, FileNotFoundError):
                shutil.rmtree(folder, ignore_errors=True)
