"""Runs a server and ends it, with all that it started, when whoever asked for it is gone: `python keeper.py FOLDER MEMORY WORDS..`.

Whoever asks holds the other end of the standard input; when that closes, by a call or by a SIGKILL, the server's process group is
killed, and removed are FOLDER, where the server keeps temporary files, MEMORY, where it reads new weights, and what SGLang itself
leaves in shared memory. A server that ends by itself takes its group with it, too. When this process has ended, so have they. Nothing but the standard library is imported.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

TYPE_CHECKING = False  # of typing's, whose import would take as long as all else
if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36  # who is left by its parent is ours
LEAVE_S = 30.0
LOOK_S = 1.0
_SHARED = "/dev/shm"
# Then names that are drawn: loads and messages of SGLang, whose processes share them, and Python's semaphores between processes.
_KINDS = ("sglang_loads_", "sgl_shm_mq_", "sem.mp-")


def _end_with_parent() -> None:
    """In the server's first process: end if this keeper is killed. It is single-threaded while it forks."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):  # nothing was left
        os.killpg(group, number)


def _shared(group: int) -> dict[str, int]:
    """Return files in shared memory that processes of `group` have mapped: they made them, as nobody else knows their names.

    With their inodes, by which they are found: a semaphore was mapped under another name, before it got its own.
    """
    inodes: set[int] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has just ended
            if os.getpgid(int(pid)) == group:
                with open(f"/proc/{pid}/maps") as maps:
                    inodes |= {int(line.split()[4]) for line in maps if f" {_SHARED}/" in line}
    with suppress(OSError), os.scandir(_SHARED) as files:
        return {
            file.path: file.inode()
            for file in files
            if file.name.startswith(_KINDS) and file.inode() in inodes
        }
    return {}


def _look_until_left(look: Callable[[], None]) -> None:
    """Look twice at what is shared whenever that may have changed, until nobody holds the other end any more.

    A process that others kill cannot be asked any more. The second look is for what was not mapped yet.
    """
    seen, again = 0, 0
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        with suppress(OSError):
            changed = os.stat(_SHARED).st_mtime_ns
            seen, again = changed, 2 if changed != seen else again
        if again:
            again -= 1
            look()
    sys.stdin.buffer.read()


def _remove(left: dict[str, int]) -> None:
    for path, inode in left.items():
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)


def _wait_for_all() -> None:
    """Wait until none is left, for so long as it may take a killed process to give its memory back."""
    end = time.monotonic() + LEAVE_S
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)


def keep(folder: str, memory: str, words: list[str]) -> int:
    """Run `words` until they end or nobody is there for them any more; return their exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(
        ["env", f"TMPDIR={folder}", *words],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )

    left: dict[str, int] = {}

    def look() -> None:
        left.update(_shared(server.pid))

    def end() -> None:
        _signal(server.pid, signal.SIGSTOP)  # none of them makes another file while its files are looked for
        look()
        _signal(server.pid, signal.SIGKILL)

    def watch() -> None:
        _look_until_left(look)
        end()

    threading.Thread(target=watch, name="watch", daemon=True).start()
    code = server.wait()
    end()  # what it started
    _wait_for_all()
    _remove(dict(left))
    for each in (folder, memory):
        shutil.rmtree(each, ignore_errors=True)
    return code


if __name__ == "__main__":
    ended = keep(sys.argv[1], sys.argv[2], sys.argv[3:])
    os._exit(ended if ended >= 0 else 128 - ended)  # the thread that reads would be waited for
