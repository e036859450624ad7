"""Threads: blocking work beside an event loop, how many share work, and which GPU, stream and host memory they work on."""

# torch types its CUDA interface in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from offbeat_ckptsync.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_Result = TypeVar("_Result")

log = logging.getLogger(__name__)

_MAX_MOVERS = 4  # a few cores saturate a machine's memory


def num_movers() -> int:
    """Return how many threads are to copy or digest together: at most four, and one per core the calling thread may use."""
    return min(_MAX_MOVERS, len(os.sched_getaffinity(0)))


def begun(work: Callable[[], _Result], *, name: str) -> Future[_Result]:
    """Begin `work` in a daemon thread of its own, which keeps no process from ending, and return its result to come."""
    future: Future[_Result] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it from here on: who gives up stops waiting

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- becomes the future's exception
            # An event loop's future takes no StopIteration: whoever waits would wait for ever.
            future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def in_thread(work: Callable[[], _Result], *, name: str) -> _Result:
    """Run `work` in a daemon thread of its own and return its result.

    Unlike `asyncio.to_thread`, a call that hangs after its deadline delays neither other calls (no pool to fill) nor
    the end of the process (no join at exit). Cancelling stops the waiting, not the work.
    """
    return await asyncio.wrap_future(begun(work, name=name))


class ShortTurns:
    """While anybody is in here, threads of Python take turns of a millisecond, not of five: an event loop waits one for each.

    The interpreter has one such setting, for all threads: it is put back when the last of those in here has left.
    """

    _TURN_S = 0.001

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._usual_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._TURN_S, self._usual_s))
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                sys.setswitchinterval(self._usual_s)


short_turns = ShortTurns()


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


class HostPages(mmap.mmap):
    """Pages of host memory that are written by this process; where it uses CUDA they can be pinned.

    A GPU copies to and from pinned pages by itself, beside everything else. They are so until the last tensor over them is
    gone: pinning takes about as long as filling them does, so what is pinned is kept from sync to sync.
    """

    _address = 0  # where they are pinned
    _runtime: Any = None  # what pinned them

    @classmethod
    def private(cls, num_bytes: int) -> HostPages:
        """Return fresh pages of this process alone, pinned where it uses CUDA."""
        pages = cls(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)  # fewer addresses to look up
        pages.pin()
        return pages

    @property
    def is_pinned(self) -> bool:
        """Whether they are pinned now."""
        return self._runtime is not None

    def pin(self) -> None:
        """Pin them, where this process uses CUDA; a refusal is logged, and copies are slower then.

        Not for a private mapping of a file: the driver would take copies of its own of pages that are to follow the file.
        """
        runtime = cuda_runtime()
        if runtime is None or self.is_pinned:
            return
        address = int(np.frombuffer(self, dtype=np.uint8).ctypes.data)
        if refusal := int(runtime.cudaHostRegister(address, len(self), _PORTABLE)):
            log.warning(
                "%d bytes of host memory cannot be pinned (CUDA error %d): copies to and from the GPU will be slower",
                len(self),
                refusal,
            )
            _forget_last_error()
        else:
            self._address, self._runtime = address, runtime

    def __del__(self) -> None:
        """Unpin them, before they are unmapped."""
        if self._runtime is not None:
            self._runtime.cudaHostUnregister(self._address)


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of this process


def cuda_runtime() -> Any:  # noqa: ANN401 -- torch's bindings have no types
    """Return CUDA's runtime as torch binds it, or None where this process does not use CUDA (yet)."""
    return torch.cuda.cudart() if torch.cuda.is_initialized() else None


def _forget_last_error() -> None:
    """Let torch look at the error of a call that was refused, or it would blame the next kernel for it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


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
