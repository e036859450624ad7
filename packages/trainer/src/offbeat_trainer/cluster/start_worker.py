"""What a private Ray runs in place of its `setup_worker.py`: a worker is a fork of the fork server, or a fresh interpreter.

Ray's own imports Ray, and starts the interpreter by a line of bash in which its path is not quoted. It also makes
environments of conda and containers, which no worker of a run has. A script of the standard library alone.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys

# Read by the workers or their fork when they begin, not by a library when it is imported.
_READ_LATER = {"OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "CUDA_VISIBLE_DEVICES"}
_CONTEXT = "--serialized-runtime-env-context="


def _forked(words: list[str]) -> bool:
    """Ask the fork server for a worker and stay as long as that does; False if it has none to give."""
    name = os.environ.get("OFFBEAT_FORK_SERVER")
    if not name:
        return False
    told = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(f"\0{name}")
            _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                return False
            socket.send_fds(line, [len(told).to_bytes(8, "big")], [0, 1, 2])
            line.sendall(told)
            if not line.recv(1):
                return False
        except OSError:
            return False
        line.recv(1)  # nothing more is said: the other end closes with the worker
    return True


def main() -> None:
    """Take the environment that the worker shall have, then start it."""
    words = [word for word in sys.argv[1:] if not word.startswith((_CONTEXT, "--language="))]
    context = next((word for word in sys.argv if word.startswith(_CONTEXT)), f"{_CONTEXT}{{}}")
    wanted: dict[str, str] = json.loads(context.removeprefix(_CONTEXT)).get("env_vars") or {}
    late = all(name in _READ_LATER or os.environ.get(name) == wanted[name] for name in wanted)
    os.environ.update(wanted)
    if not (late and _forked(words)):
        os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()
