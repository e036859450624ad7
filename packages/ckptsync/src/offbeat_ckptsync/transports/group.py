"""A process group of a source and its receiving ranks: what `broadcast` sends over.

Over gloo and NCCL alike a wait looks at the work again and again, until it is done, its deadline is over, or the group was
left: whoever leaves, or is lost, ends nobody else's process and holds nobody up for longer than the deadline says.
"""

# torch types its distributed bindings in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false

from __future__ import annotations

import atexit
import base64
import os
import socket
import threading
import time
from collections import deque
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed import Store as TorchStore
from torch.distributed.distributed_c10d import BroadcastOptions

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.threads import use_device

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from offbeat_ckptsync.store import Store

CHUNK_BYTES = 16 << 20
"""Bytes per broadcast over gloo, and `IN_FLIGHT` of them at a time: smaller ones cost half a millisecond each (two cores move a
GiB in 0.30 s like this, in 0.36 s in chunks of 4 MiB, in 0.55 s in chunks of 1 MiB), larger ones make packing wait. NCCL cuts by
itself and gets buckets whole."""

IN_FLIGHT = 4
GLOO_DEVICES, GLOO_THREADS = 2, 4
"""Each device of gloo has connections of its own and one thread that moves bytes; each of the other threads waits for one
broadcast. Two cores sync a GiB in a tenth to a sixth less time with two devices than with one, and no faster with more."""

LEAVE_S = 2.0
"""How long a process that ends waits for the groups it has left."""

Seats = list[list[str | int]]
"""[member, rank] of every receiving rank, in the order of group ranks 1, 2, ..."""

_LOOK_S = 0.0002  # between two looks at a work
_TURN_S = 0.1  # of a wait at the store: others may wait for the same connection


class Group:
    """The source as rank 0, and `seats[i]` as rank i + 1."""

    def __init__(self, group_id: str, seats: Seats, *, prefix: str = "") -> None:
        """Meet under keys that begin with `prefix`, the id where it is empty."""
        self.id = group_id
        self.prefix = prefix or group_id
        self.seats = seats
        self._held: list[Any] = []  # the process group, once built
        self._calls = threading.Lock()  # into it; they only begin something
        self._met_at: TorchStore | None = None  # torch holds on to its own half of it only
        self._left = threading.Event()
        self._flying: deque[list[Any]] = (
            deque()
        )  # of broadcasts, the oldest first: work and chunk, nothing once done
        self._chunk_bytes = CHUNK_BYTES

    def build(self, store: Store, rank: int, host: str, device: str, timeout_s: float) -> None:
        """Meet the others as `rank`, who is reached at `host`.

        Raises:
            TransferError: the group does not form; names its ranks.
        """
        world = len(self.seats) + 1
        try:
            if device == "cpu":
                self._met_at = StoreForTorch(store, timeout_s, self._left.is_set)
                own = PrefixStore(self.prefix, self._met_at)
                self._hold(_gloo(own, rank, world, host, timeout_s))
                return
            self._met_at = self._torch_store(store, rank, timeout_s)
            own = PrefixStore(self.prefix, self._met_at)
            self._chunk_bytes = 1 << 62
            self._connect(lambda: nccl_group(own, rank, world, device, timeout_s), device, timeout_s)
        except (RuntimeError, ValueError, TransferError) as error:
            self.leave()
            names = ", ".join(f"rank {seat_rank} of {member}" for member, seat_rank in self.seats)
            raise TransferError(
                f"broadcast: the group of {world} (source, {names}) did not form: {error}"
            ) from error

    def _torch_store(self, store: Store, rank: int, timeout_s: float) -> TCPStore:
        """Return a store of torch's own, which NCCL's groups ask for more than ours does; rank 0 hosts it beside ours."""
        key = f"{self.prefix}/port"
        if rank == 0:
            # By itself it listens on every interface; a socket handed in keeps it to one.
            listener = socket.create_server((store.host, 0))
            port = int(listener.getsockname()[1])
            hosted = TCPStore(
                store.host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            store.set(key, str(port))
            return hosted
        told = store.get(key, timeout_s)
        if told is None:
            raise TransferError(f"the source named no port within {timeout_s:g} s")
        limit = timedelta(seconds=timeout_s)
        return TCPStore(store.host, int(told), is_master=False, wait_for_workers=False, timeout=limit)

    def _connect(self, make: Callable[[], Any], device: str, timeout_s: float) -> None:
        """NCCL connects in the first call, which looks at no clock: a thread makes it, and is left behind where it hangs."""
        failures: list[Exception] = []

        def connect() -> None:
            try:
                self._hold(make())
                self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), timeout_s)
            except Exception as error:  # noqa: BLE001 -- raised below, in the thread that waits
                failures.append(error)

        deadline = time.monotonic() + timeout_s
        thread = threading.Thread(target=connect, name=f"connect {self.id}", daemon=True)
        thread.start()
        while thread.is_alive():
            if self._left.is_set() or time.monotonic() > deadline:
                raise TransferError(
                    "it was left" if self._left.is_set() else f"not all came within {timeout_s:g} s"
                )
            thread.join(0.01)
        for failure in failures:
            raise failure

    def _hold(self, made: Any) -> None:  # noqa: ANN401 -- as `_begun`
        self._held = [made]
        if self._left.is_set():  # meanwhile
            self.leave()
            raise TransferError("it was left")

    def broadcast(self, payload: torch.Tensor, timeout_s: float) -> None:
        """Send to all from rank 0, or receive; returns when `payload` may be used again."""
        self.start(payload, timeout_s)()

    def start(self, payload: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        """Begin to send to all from rank 0, or to receive; return a call that waits until `payload` may be used again.

        Chunks of several payloads may be under way, `IN_FLIGHT` in all; whoever is one too many is waited for here.
        """
        options: Any = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(timeout_s, 0.001))
        deadline = time.monotonic() + timeout_s
        own: list[list[Any]] = []
        for chunk in self._chunks(payload):
            while len(self._flying) >= IN_FLIGHT:
                self._finish(self._flying[0], deadline)
                self._flying.popleft()
            own.append([self._begun(lambda made, part=chunk: made.broadcast([part], options)), chunk])
            self._flying.append(own[-1])

        def finish() -> None:
            for works in own:
                self._finish(works, deadline)

        return finish

    def leave(self) -> None:
        """Abort what is under way here and close the connections, at any moment and from any thread.

        Until that is done the chunks under way are held: a kernel of NCCL's may still write to them.
        """
        self._left.set()
        held, self._held = self._held, []
        ended = held, self._calls, self._flying.copy()
        thread = threading.Thread(target=_end, args=ended, name="leave group", daemon=True)
        thread.start()
        _leaving[:] = [*filter(threading.Thread.is_alive, _leaving), thread]

    def _begun(self, call: Callable[[Any], Any]) -> Any:  # noqa: ANN401 -- torch's process groups have no type in common
        """Call into the group, and hold on to it no longer: whoever lets go of it last waits for what it has in flight."""
        with self._calls:
            held = self._held
            if not held:
                raise TransferError("the group was left")
            return call(held[0])

    def _chunks(self, payload: torch.Tensor) -> Iterator[torch.Tensor]:
        for first in range(0, payload.numel(), self._chunk_bytes):
            yield payload[first : first + self._chunk_bytes]

    def _finish(self, flying: list[Any], deadline: float) -> None:
        """Wait for a broadcast, and let go of it: done is done, whoever asks again."""
        if not flying:
            return
        while not flying[0].is_completed():
            if self._left.is_set():
                raise TransferError("the group was left")
            if time.monotonic() > deadline:
                raise TransferError("nothing more came in time")
            time.sleep(_LOOK_S)
        flying[0].wait()  # raises what went wrong
        flying.clear()


class StoreForTorch(TorchStore):
    """Our store as gloo asks one, for where its ranks are; with torch's own it would wait for the name server."""

    def __init__(self, store: Store, timeout_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._store = store
        self._timeout_s = timeout_s
        self._stop = stop

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Write bytes."""
        self._store.set(key, base64.b64encode(value).decode())

    def get(self, key: str) -> bytes:
        """Wait for bytes; raises `TransferError` where none come in time, or `stop` says so."""
        deadline = time.monotonic() + self._timeout_s
        while (text := self._store.get(key, _TURN_S)) is None:
            if self._stop() or time.monotonic() > deadline:
                cause = "it was left" if self._stop() else f"not all came within {self._timeout_s:g} s"
                raise TransferError(cause)
        return base64.b64decode(text)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Wait for all of `keys`; raises as `get`."""
        for key in keys:
            self.get(key)


_leaving: list[threading.Thread] = []
_making = threading.Lock()
_WITHOUT_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"


@atexit.register
def _let_them_leave() -> None:
    """Give groups that are being left some time to end: gloo aborts a process that exits in the midst of it."""
    deadline = time.monotonic() + LEAVE_S
    for thread in _leaving:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _end(held: list[Any], calls: threading.Lock, flying: deque[list[Any]]) -> None:
    """Abort a process group: NCCL's kernels end with it; gloo's sockets close with the last reference, which frees the peers.

    Gloo first waits for what this rank has in flight, up to its deadline.
    """
    for group in held:
        group.abort()
    flying.clear()
    with calls:
        pass  # who calls into the group just now does not let go of it last
    held.clear()


def _gloo(store: PrefixStore, rank: int, world: int, host: str, timeout_s: float) -> Any:  # noqa: ANN401 -- as above
    options: Any = ProcessGroupGloo._Options()  # noqa: SLF001 -- torch gives no public way
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001 -- as above
    options._threads = GLOO_THREADS  # noqa: SLF001 -- as above
    options._devices = [  # noqa: SLF001 -- as above
        ProcessGroupGloo.create_device(hostname=host) for _ in range(GLOO_DEVICES)
    ]
    return ProcessGroupGloo(store, rank, world, options)


def nccl_group(store: PrefixStore, rank: int, world: int, device: str, timeout_s: float) -> Any:  # noqa: ANN401 -- as above
    """Make a group over NCCL, on `device`, of which no lost peer ends this process; its first call connects, and looks at no clock."""
    from torch.distributed import ProcessGroupNCCL

    use_device(device)
    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001 -- torch gives no public way
    with _without_watchdog():
        return ProcessGroupNCCL(store, rank, world, options)


@contextmanager
def _without_watchdog() -> Generator[None]:
    """Let the NCCL group that is made inside have no watchdog, which ends the process when a peer is lost.

    torch reads this from the environment when it makes a group, and only then; there is no option for it. So the trainer's and
    vLLM's own groups, made at other times, keep theirs.
    """
    with _making:
        before = os.environ.get(_WITHOUT_WATCHDOG)  # noqa: TID251 -- see above
        os.environ[_WITHOUT_WATCHDOG] = "1"  # noqa: TID251
        try:
            yield
        finally:
            if before is None:
                del os.environ[_WITHOUT_WATCHDOG]  # noqa: TID251
            else:
                os.environ[_WITHOUT_WATCHDOG] = before  # noqa: TID251
