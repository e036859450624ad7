"""One process group from the source to every receiving rank: gloo for host memory, NCCL for GPUs.

The group is private (beside any default group) and is kept while the membership stays the same: every sync begins with a roll call at
a store of the source (`rendezvous`), and where all are in the source's group that one is used; else all build another. A failure on
any side drops its group, so the next sync builds a fresh one. What travels in the group is neither signed nor encrypted: gloo and
NCCL want a network in which nobody is a stranger. docs/sync-protocol.md, section 7, has the words.

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
import uuid
from collections import deque
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed import Store as TorchStore
from torch.distributed.distributed_c10d import BroadcastOptions

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.seams import BucketReceiver, BucketSender, Transport
from offbeat_ckptsync.toolkit.store import Store, own_address
from offbeat_ckptsync.toolkit.threads import begun, own_device, use_device
from offbeat_ckptsync.transports.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_ckptsync.values import Bucket, RankId, SyncOffer


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

RankIds = list[list[str | int]]
"""[member, rank] of every receiving rank, in the order of group ranks 1, 2, ..."""

_LOOK_S = 0.0002  # between two looks at a work
_TURN_S = 0.1  # of a wait at the store: others may wait for the same connection


class Group:
    """The source as rank 0, and `rank_ids[i]` as rank i + 1."""

    def __init__(self, group_id: str, rank_ids: RankIds, *, prefix: str = "") -> None:
        """Meet under keys that begin with `prefix`, the id where it is empty."""
        self.id = group_id
        self.prefix = prefix or group_id
        self.rank_ids = rank_ids
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
        world = len(self.rank_ids) + 1
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
            names = ", ".join(f"rank {rank_id_rank} of {member}" for member, rank_id_rank in self.rank_ids)
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

        def connect() -> None:
            self._hold(make())
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), timeout_s)

        deadline = time.monotonic() + timeout_s
        connected = begun(connect, name=f"connect {self.id}")
        while not connected.done():
            if self._left.is_set() or time.monotonic() > deadline:
                raise TransferError(
                    "it was left" if self._left.is_set() else f"not all came within {timeout_s:g} s"
                )
            time.sleep(0.01)
        connected.result()

    def _hold(self, made: Any) -> None:  # noqa: ANN401 -- torch's process groups have no type in common
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
            own.append(self._begun(chunk, options))

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
        ended = held, self._calls, self._flying
        thread = threading.Thread(target=_end, args=ended, name="leave group", daemon=True)
        thread.start()
        _leaving[:] = [*filter(threading.Thread.is_alive, _leaving), thread]

    def _begun(self, chunk: torch.Tensor, options: BroadcastOptions) -> list[Any]:
        """Begin to broadcast, and hold on to the group no longer: whoever lets go of it last waits for what it has in flight."""
        with self._calls:
            held = self._held
            if not held:
                raise TransferError("the group was left")
            self._flying.append([held[0].broadcast([chunk], options), chunk])
            return self._flying[-1]

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

    Gloo cannot abort. It waits for what this rank has in flight, until a peer closes or the deadline is over. A work refers to
    its group, also when it is done: so all works are let go of here, whoever still holds on to a wait.
    """
    for group in held:
        group.abort()
    with calls:  # who calls into the group just now does not let go of it last
        for each in flying.copy():
            each[:] = [_Left(), None] if each else []
    held.clear()


class _Left:
    """In the place of a work in a group that was left."""

    def is_completed(self) -> bool:
        raise TransferError("the group was left")

    wait = is_completed


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


class BroadcastTransport(Transport):
    """Satisfies `Transport` over a process group; rank 0 is the source."""

    def __init__(self, config: SyncConfig) -> None:
        """Listen, as a source, on `config.host`; payloads live on `config.device`."""
        self.device = own_device(config.device)
        self._lock = threading.Lock()
        self.rendezvous = Rendezvous("broadcast", config, asked="here", told="go")
        self._group: Group | None = None

    def open(self, sync_id: str, members: list[str]) -> dict[str, str | int | float]:
        """Host the store (once) and say where it is."""
        group = self._group
        return self.rendezvous.open(keep="" if group is None else f"{group.prefix}/")

    def sender(self, offer: SyncOffer, members: list[str]) -> _Sender:
        """Call the roll and build or reuse the group."""
        roll = self.rendezvous.call_roll(offer, members)
        rank_ids: RankIds = [[member, rank] for member, words in roll.items() for rank in range(len(words))]
        group = self._group
        together = all(
            here["group"] == (group.id if group else "") for ranks in roll.values() for here in ranks
        )
        if group is None or group.rank_ids != rank_ids or not together:
            group = self._new_group(uuid.uuid4().hex, rank_ids)
            self._drop()
        self.rendezvous.tell(offer, {"group": group.id, "rank_ids": rank_ids})
        self._join_group(group, self.rendezvous.store, offer, rank=0)
        return _Sender(self, offer, group)

    def receiver(self, offer: SyncOffer, rank_id: RankId) -> _Receiver:
        """Answer the roll call and build or reuse the group."""
        self.rendezvous.answer(offer, rank_id, {"group": self._group.id if self._group else ""})
        told = self.rendezvous.hear(offer, rank_id)
        group = self._group
        if group is None or group.id != told["group"]:
            self._drop()
            group = self._new_group(told["group"], told["rank_ids"])
            rank = 1 + told["rank_ids"].index([rank_id.member, rank_id.rank])
            self._join_group(group, self.rendezvous.source_store(offer, rank_id), offer, rank=rank)
        return _Receiver(self, offer, group)

    def abort(self, sync_id: str) -> None:
        """End the waits of `sync_id` here and drop the group: what hangs in it is left to its deadline."""
        self.rendezvous.abort(sync_id)
        self._drop()

    def close(self) -> None:
        """Leave the group and the stores."""
        self._drop()
        self.rendezvous.close()

    def failed(self, group: Group) -> None:
        """Forget a group in which something failed."""
        with self._lock:
            if self._group is group:
                self._group = None
        group.leave()

    def _drop(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.leave()

    def _new_group(self, group_id: str, rank_ids: RankIds) -> Group:
        return Group(group_id, rank_ids, prefix=self.rendezvous.private(group_id))

    def _join_group(self, group: Group, store: Store, offer: SyncOffer, *, rank: int) -> None:
        if self._group is group:
            return
        # Peers reach a rank at the address from which it reaches the source; what a host is called may lead elsewhere.
        host = own_address(store.host, store.port)
        with self._lock:  # before it is built: an abort ends that, too, or the next sync would wait for it
            if self.rendezvous.is_aborted(offer.sync_id):
                raise TransferError("broadcast: aborted before the group formed")
            self._group = group
        try:
            group.build(store, rank, host, self.device, float(offer.endpoint["rendezvous_s"]))
        except BaseException:
            self.failed(group)
            raise


class _End:
    in_flight = 2  # the wire is not idle while the next one is taken up

    def __init__(self, transport: BroadcastTransport, offer: SyncOffer, group: Group) -> None:
        self._transport = transport
        self._offer = offer
        self._group = group
        self._deadline = time.monotonic() + float(offer.endpoint["timeout_s"])

    def begin(self, bucket: Bucket, payload: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to move a bucket's bytes; return a call that waits for them."""
        if self._transport.rendezvous.is_aborted(self._offer.sync_id):
            raise TransferError(f"broadcast: aborted before bucket {bucket.index}")
        left_s = self._deadline - time.monotonic()
        with self._explained(bucket, what):
            end = self._group.start(payload, left_s)

        def wait() -> None:
            with self._explained(bucket, what):
                end()

        return wait

    @contextmanager
    def _explained(self, bucket: Bucket, what: str) -> Generator[None]:
        try:
            yield
        except (RuntimeError, TransferError) as error:  # TransferError: too late, or left by `abort`
            self._transport.failed(self._group)
            raise TransferError(
                f"broadcast: bucket {bucket.index} of version {self._offer.version} could not be {what}: {error}"
            ) from error


class _Sender(_End, BucketSender):
    def send(self, bucket: Bucket, payload: torch.Tensor) -> None:
        self.start(bucket, payload)()

    def start(self, bucket: Bucket, payload: torch.Tensor) -> Callable[[], None]:
        return self.begin(bucket, payload, "sent")

    def waits_for(self) -> str:
        return ", ".join(f"rank {rank} of {member}" for member, rank in self._group.rank_ids)

    def close(self) -> None:
        """The group stays for the next sync."""


class _Receiver(_End, BucketReceiver):
    def receive(self, bucket: Bucket, into: torch.Tensor) -> None:
        self.start(bucket, into)()

    def start(self, bucket: Bucket, into: torch.Tensor) -> Callable[[], None]:
        return self.begin(bucket, into, "received")

    def close(self) -> None:
        """The group stays for the next sync."""
