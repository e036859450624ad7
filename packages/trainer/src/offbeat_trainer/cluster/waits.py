"""Waiting for another process: always with a deadline, an owner and a message."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
import threading
import time
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, TypeVar

from ray.exceptions import RayActorError, RayTaskError

from offbeat_trainer.data.loading import own_place
from offbeat_trainer.errors import DeadlineExceeded, WorkerGone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Sequence


log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

GRACE_S = 5.0
"""How long to listen to the others after a first failure: a rank often sees its peer's death before Ray tells of it."""


async def answer(call: Awaitable[Any], *, owner: str, what: str, timeout_s: float | None) -> Any:  # noqa: ANN401
    """Return what `owner` answers to `call`; without `timeout_s` someone else decides how long to wait.

    Raises:
        DeadlineExceeded: no answer within `timeout_s`.
        WorkerGone: the process of `owner` died.
        Exception: whatever the call itself raised over there.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except RayTaskError as error:
        # Before TimeoutError: Ray makes a remote error an instance of its cause's class, too.
        cause = error.cause
        log.error("%s failed to %s:\n%s", owner, what, error)
        if isinstance(cause, Exception):
            place = own_place(str(error))
            cause.add_note(f"({owner}, {what}{f', at {place}' if place else ''})")
            raise cause from None  # Ray's wrapper holds a page of remote traceback: it is in the log
        raise
    except TimeoutError as error:
        assert timeout_s is not None
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s for {owner} to {what} and got no answer; its log in the run folder says what it "
            "was doing. If it was only slow, raise trainer.step_timeout_s"
        ) from error
    except RayActorError as error:
        raise WorkerGone(
            f"{owner} died while it should {what}; its log in the run folder says why ({_reason(error)})"
        ) from error


def _reason(error: RayActorError) -> str:
    """Return the line that says most: of what a process raised as it began the last one, which may be all there is of it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if error.actor_init_failed else lines[0]


async def answers(
    calls: Sequence[Awaitable[Any]], *, owners: Sequence[str], what: str, timeout_s: float
) -> list[Any]:
    """Return all answers, in order; the first failure is raised once the rest have been given up.

    A dead process comes before everything else: its peers' broken connections are only what they saw of it.
    """
    waiting = [
        asyncio.create_task(
            answer(call, owner=owner, what=what, timeout_s=timeout_s), name=f"{owner}: {what}"
        )
        for call, owner in zip(calls, owners, strict=True)
    ]
    try:
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        if rest:
            await asyncio.wait(rest, timeout=GRACE_S)
    finally:
        for task in waiting:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
    first = [error for task in done if (error := task.exception()) is not None]
    gone = [error for error in ended if isinstance(error, WorkerGone)]
    for error in (*gone, *first):
        raise error
    return ended


async def guarded(
    work: Coroutine[Any, Any, _Result], watch: Coroutine[Any, Any, object], *, name: str
) -> _Result:
    """Return what `work` returns or raises; if `watch` raises first, end `work`, wait for that, and raise it.

    Where both fail, `watch` tells: what `work` saw of a death may be no more than a broken connection.
    """
    working = asyncio.create_task(work, name=name)
    watching = asyncio.create_task(watch, name=f"watch over {name}")
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done() and (not working.done() or working.exception() is not None):
            watching.result()
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


# `deterministic` asks for it before a rank's first product on a GPU; it is as large as torch's own choice.
CUDA_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# A rank on a CPU hands what it frees back to the kernel while it loads, so that its peak is of what it holds.
# (glibc takes a block of this size or more straight from the kernel.)
LOADING_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_ARENA_MAX": "1"}
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of mallopt(3), as in malloc.h


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, up to its own peak, from now on; for a process that has loaded.

    A step frees and takes the same large buffers again and again. By default glibc hands each back to the kernel, and
    the page faults were a sixth of a step's CPU time.
    """
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 << 20), (_MMAP_MAX, 0)):
        mallopt(option, value)


def moves(num_looks: int = 50, pause_s: float = 0.02) -> bool:
    """Say whether code of this process moves: from micro-batch to micro-batch, or within a file that it reads or writes.

    Threads are looked at up to `num_looks` times. One that stands in a single call, say a collective that another rank does not
    join, stands in the same place each time. A call that writes a large tensor does so, too, but its bytes are counted.
    """
    first, first_bytes = _places(), _bytes_moved()
    for _ in range(num_looks):
        time.sleep(pause_s)
        if _places() != first or _bytes_moved() - first_bytes >= _MOVED_BYTES:
            return True
    return False


_MOVED_BYTES = 1 << 20  # far more than what is logged meanwhile


def _bytes_moved() -> int:
    """Return how much this process has read and written so far, by files; 0 where the kernel does not say."""
    try:
        told = Path("/proc/self/io").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in told.splitlines())  # calls are counted, too: they are few


def _places() -> list[list[tuple[int, int]]]:
    """Return where each other thread stands that runs code of ours."""
    stacks = [
        [frame for frame, _ in walk_stack(top)]
        for thread, top in sys._current_frames().items()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        if thread != threading.get_ident()
    ]
    return [
        [(id(frame), frame.f_lasti) for frame in stack]
        for stack in stacks
        if any(frame.f_globals.get("__name__", "").startswith("offbeat_") for frame in stack)
    ]


def redirect_output(log_path: str) -> None:
    """Send this process's stdout and stderr, and those of its children, to `log_path` (appended)."""
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
    )
