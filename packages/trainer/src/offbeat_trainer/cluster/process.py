"""What every process of a run does first: put its output where a person finds it, and say who it is."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from pathlib import Path
from traceback import walk_stack

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
