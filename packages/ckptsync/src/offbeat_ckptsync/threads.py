"""Threads: blocking work beside an event loop, how many share work, and which GPU and stream they work on."""

# torch types its CUDA interface in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from offbeat_ckptsync.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_Result = TypeVar("_Result")

_MAX_MOVERS = 4  # a few cores saturate a machine's memory


def num_movers() -> int:
    """Return how many threads are to copy or digest together: at most four, and one per core the calling thread may use."""
    return min(_MAX_MOVERS, len(os.sched_getaffinity(0)))


async def in_thread(work: Callable[[], _Result], *, name: str) -> _Result:
    """Run `work` in a daemon thread of its own and return its result.

    Unlike `asyncio.to_thread`, a call that hangs after its deadline delays neither other calls (no pool to fill) nor
    the end of the process (no join at exit). Cancelling stops the waiting, not the work.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def settle(result: _Result | None, error: BaseException | None) -> None:
        if done.done():
            return  # the waiter gave up
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        else:
            done.set_exception(error)

    def run() -> None:
        result: _Result | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 -- becomes the future's exception
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def own_device(device: str) -> str:
    """Return a torch device with its index: "cuda" is the calling thread's current GPU, everything else stays.

    Raises:
        SyncError: torch sees no CUDA device.
    """
    if device != "cuda":
        return device
    if not torch.cuda.is_available():
        raise SyncError('payloads are to be on "cuda" and torch sees no CUDA device; set `device` to "cpu"')
    return f"cuda:{torch.cuda.current_device()}"


def use_device(device: str) -> None:
    """Make `device` the calling thread's current GPU; harmless for "cpu".

    Each thread has a current GPU of its own, and begins with the first one that its process sees: one that works for rank 1
    of a tensor-parallel replica must be told.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)


def settle(device: torch.device) -> None:
    """Wait until everything queued on a GPU is done, and raise what failed there; nothing to wait for on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class SideStream:
    """A CUDA stream of one thread's own, so that it waits for no one's training or generation; on the CPU nothing."""

    def __init__(self, device: str) -> None:
        """Make a stream where `device` is a CUDA device."""
        self._stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None

    @contextmanager
    def after(self, mark: torch.cuda.Event | None = None) -> Generator[None]:
        """Run what is inside on this stream, behind everything that `mark` stands for."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            yield


def mark_of(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """Return an event behind all work that the calling thread has queued on `tensor`'s GPU; None on the CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


class BusyClock:
    """How long at least one thread was at work."""

    def __init__(self) -> None:
        """Start at zero."""
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._busy = 0
        self._since = 0.0

    def __enter__(self) -> None:
        """One more is at work."""
        with self._lock:
            if self._busy == 0:
                self._since = time.perf_counter()
            self._busy += 1

    def __exit__(self, *_: object) -> None:
        """One less is."""
        with self._lock:
            self._busy -= 1
            if self._busy == 0:
                self.seconds += time.perf_counter() - self._since
