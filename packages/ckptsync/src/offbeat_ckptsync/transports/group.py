"""A process group of a source and its receiving ranks: what `broadcast` sends over."""

# torch types its distributed bindings in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateUsage=false

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import BroadcastOptions

from offbeat_ckptsync.errors import TransferError

if TYPE_CHECKING:
    from offbeat_ckptsync.store import Store

CHUNK_BYTES = 16 << 20
"""Bytes per broadcast, and `IN_FLIGHT` of them at a time: smaller ones cost half a millisecond each (two cores move a GiB in
0.30 s like this, in 0.36 s in chunks of 4 MiB, in 0.55 s in chunks of 1 MiB), larger ones make packing wait."""

IN_FLIGHT = 4
GLOO_DEVICES, GLOO_THREADS = 2, 4
"""Each device of gloo has connections of its own and one thread that moves bytes; each of the other threads waits for one
broadcast. Two cores sync a GiB in a tenth to a sixth less time with two devices than with one, and no faster with more."""

LEAVE_S = 2.0
"""How long a process that ends waits for the groups it has left."""

Seats = list[list[str | int]]
"""[member, rank] of every receiving rank, in the order of group ranks 1, 2, ..."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Group:
    """The source as rank 0, and `seats[i]` as rank i + 1."""

    def __init__(self, group_id: str, seats: Seats) -> None:
        self.id = group_id
        self.seats = seats
        self._held: list[Any] = []  # the process group, once built

    def build(self, store: Store, rank: int, host: str, device: str, timeout_s: float) -> None:
        """Meet the others as `rank`; raises `TransferError`, naming them, where the group does not form."""
        world = len(self.seats) + 1
        own = PrefixStore(self.id, store.raw)
        try:
            if device != "cpu":
                from torch.distributed import ProcessGroupNCCL

                options: Any = ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001 -- torch gives no public way
                self._held = [ProcessGroupNCCL(own, rank, world, options)]
                return
            options = ProcessGroupGloo._Options()  # noqa: SLF001 -- as above
            options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001 -- torch gives no public way
            options._threads = GLOO_THREADS  # noqa: SLF001 -- as above
            # Peers reach a loopback source over loopback; elsewhere gloo finds this machine's own address.
            local = host in _LOOPBACK
            options._devices = [  # noqa: SLF001 -- as above
                ProcessGroupGloo.create_device(hostname=host)
                if local
                else ProcessGroupGloo.create_default_device()
                for _ in range(GLOO_DEVICES)
            ]
            self._held = [ProcessGroupGloo(own, rank, world, options)]
        except (RuntimeError, ValueError) as error:
            names = ", ".join(f"rank {seat_rank} of {member}" for member, seat_rank in self.seats)
            raise TransferError(
                f"broadcast: the group of {world} (source, {names}) did not form: {error}"
            ) from error

    def broadcast(self, payload: torch.Tensor, timeout_s: float) -> None:
        """Send to all from rank 0, or receive; returns when `payload` may be used again."""
        options: Any = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(timeout_s, 0.001))
        works: deque[Any] = deque()
        for start in range(0, payload.numel(), CHUNK_BYTES):
            works.append(self._held[0].broadcast([payload[start : start + CHUNK_BYTES]], options))
            if len(works) >= IN_FLIGHT:
                works.popleft().wait()
        for work in works:
            work.wait()
        _settle(payload)

    def give(self, payload: torch.Tensor, ranks: list[int], timeout_s: float) -> None:
        """Send to some ranks of the group only, a chunk at a time to all of them."""
        limit = timedelta(seconds=max(timeout_s, 0.001))
        for start in range(0, payload.numel(), CHUNK_BYTES):
            chunk = [payload[start : start + CHUNK_BYTES]]
            for work in [self._held[0].send(chunk, rank, 0) for rank in ranks]:
                work.wait(limit)
        _settle(payload)

    def take(self, payload: torch.Tensor, timeout_s: float) -> None:
        """Receive what `give` sends."""
        limit = timedelta(seconds=max(timeout_s, 0.001))
        for start in range(0, payload.numel(), CHUNK_BYTES):
            self._held[0].recv([payload[start : start + CHUNK_BYTES]], 0, 0).wait(limit)
        _settle(payload)

    def leave(self) -> None:
        """Close the connections."""
        # The last reference closes the sockets, which frees the peers at once. It first waits for what this rank has
        # in flight, up to its deadline, so it is dropped in a thread of its own.
        held, self._held = self._held, []
        thread = threading.Thread(target=held.clear, name="leave group", daemon=True)
        thread.start()
        _leaving[:] = [*filter(threading.Thread.is_alive, _leaving), thread]


_leaving: list[threading.Thread] = []


@atexit.register
def _let_them_leave() -> None:
    """Give groups that are being left some time to end: gloo aborts a process that exits in the midst of it."""
    deadline = time.monotonic() + LEAVE_S
    for thread in _leaving:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _settle(payload: torch.Tensor) -> None:
    if payload.is_cuda:
        torch.cuda.current_stream(
            payload.device
        ).synchronize()  # NCCL only queues; the caller reuses `payload`
