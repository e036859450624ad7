"""Workers of a private Ray as forks of one process that has imported what they need.

A fresh worker imports torch, transformers and an engine: four to six seconds of a core, and a run has several. The fork server
imports them once, while the driver still checks settings. `start_worker.py` asks it for a fork. The fork runs Ray's own
`default_worker` with the environment, folder and standard files that it would have had. Run as a script, this file is the server.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

ENVIRONMENT_VARIABLE = "OFFBEAT_FORK_SERVER"  # its name as an abstract socket; `start_worker.py` reads it
# glibc reads these when a process starts, which a fork does not: the numbers are mallopt's, of malloc.h.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}
_NUM_WAITING = 64
_KILLED_S = 60.0  # within which a killed process is gone, on a machine that has other things to do


@contextmanager
def fork_server(modules: Sequence[str]) -> Generator[None]:
    """Start a process that imports `modules`; a private Ray started meanwhile has its workers forked of it.

    Returns at once: workers that come before everything is imported wait. Without the server, for instance because it was
    killed, they start as fresh interpreters. `modules` must start no thread, use no GPU and leave Ray alone, which reads
    the environment when it is imported. The server ends with the context, or with this process.
    """
    name = f"offbeat-forks-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(_NUM_WAITING)
        process = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno()), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C and Ctrl-Z are for the driver
        )
    os.environ[ENVIRONMENT_VARIABLE] = name  # Ray's processes inherit it
    try:
        with process:
            try:
                yield
            finally:
                process.kill()  # it may be importing, and has nothing to lose
                process.wait(_KILLED_S)  # `with` gives up after 0.25 s where Ctrl-C was pressed
    finally:
        del os.environ[ENVIRONMENT_VARIABLE]


def _serve(listener: socket.socket) -> socket.socket | None:
    """Fork for each of this user's processes that asks, until standard input ends; return in a fork, with who asked."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    poll = select.poll()
    poll.register(0)
    poll.register(listener, select.POLLIN)
    while 0 not in dict(poll.poll()):
        asking, _ = listener.accept()
        _, user, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid() and os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)  # when a worker dies, Ray ends its process group
            return asking
        asking.close()
    return None


def _become(asking: socket.socket) -> list[str]:
    """Take the environment, folder and standard files of who asks; return the words of its command."""
    size, files, _, _ = socket.recv_fds(asking, 8, 3)
    with asking.makefile("rb") as read:
        words, environment, folder = json.loads(read.read(int.from_bytes(size, "big")))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    libc = ctypes.CDLL(None)
    for name, number in _MALLOC.items():
        if name in environment:
            libc.mallopt(number, int(environment[name]))
    asking.sendall(b"1")
    return words


def main() -> None:
    """Import, fork for who asks, and in a fork be the worker."""
    _, descriptor, *modules = sys.argv
    own = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != own]  # `modules` are installed
    gc.disable()
    try:
        for name in modules:
            import_module(name)
    except Exception:  # noqa: BLE001
        os._exit(1)  # fresh workers import it again, and what they lack is told with their names
    gc.freeze()
    gc.enable()
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        os._exit(1)  # a fork would have their locks and not the threads: better none
    with socket.socket(fileno=int(descriptor)) as listener:
        asking = _serve(listener)
    if asking is not None:
        sys.argv = _become(asking)
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
