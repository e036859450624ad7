# pyright: basic
"""Ray's workers as forks of one process that has loaded the libraries.

A fresh worker imports Ray twice, torch, tensordict and transformers: six seconds of a core, and a test's run has up to five.
A fork is the same call of Ray's own `default_worker`, in its own environment, with its own standard files. What
glibc reads at the start of a process is the one thing that it does not have.
"""

from __future__ import annotations

import json
import os
import runpy
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

# Not Ray: what its workers are told by their environment it reads as it is imported.
PRELOADED = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "offbeat_engine.fsdp2.engine",
    "offbeat_rollout.hf.engine",
    "offbeat_trainer.learner",
    "offbeat_trainer.weights.member",
)
STOP_TIMEOUT_S = 60.0
# What stands in for the interpreter where Ray starts a worker: it hands its arguments, environment and standard files over,
# and is there as long as the fork is. Whatever else it is started for, and with nobody listening, it is the interpreter.
# The kernel would take an interpreter's path with a space, or a long one, for something else: to `sh` the second line is a
# command, to Python the two are a string.
LAUNCHER = """#!/bin/sh
'''exec' {quoted} -IS "$0" "$@"
' '''
import json, os, socket, sys
words = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as line:
    try:
        if not words or not words[0].endswith("setup_worker.py"):
            raise ConnectionError
        line.connect("\\0{name}")
    except OSError:
        os.execv({python!r}, [{python!r}, *words])
    told = json.dumps([words[1:], dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(line, [len(told).to_bytes(8, "big")], [0, 1, 2])
    line.sendall(told)
    line.recv(1)  # nothing is said: the other end closes with the worker
"""


@contextmanager
def forked_workers() -> Generator[str]:
    """Keep a process ready of which workers are forked; return what must be `sys.executable` where a Ray is started.

    It has the environment of this process: what the libraries read when they are imported must be set by now.
    """
    with tempfile.TemporaryDirectory(prefix="forks-") as folder:
        name, launcher = f"ray-forks-{secrets.token_hex(8)}", Path(folder) / "python"
        launcher.write_text(
            LAUNCHER.format(python=sys.executable, quoted=shlex.quote(sys.executable), name=name)
        )
        launcher.chmod(0o755)
        command = [sys.executable, __file__, name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as source:
            assert source.stdin is not None
            assert source.stdout is not None
            assert source.stdout.readline(), "it says why above"
            try:
                yield str(launcher)
            finally:
                source.stdin.close()
                source.wait(STOP_TIMEOUT_S)


def serve(name: str) -> tuple[list[str], socket.socket] | None:
    """Fork for whoever asks, until standard input ends; return in a fork, with the words of its worker and the line to hold."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")  # in no folder: a name in one may be too long
        listener.listen(64)
        print("ready", flush=True)
        poll = select.poll()
        poll.register(0)
        poll.register(listener, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if 0 in ready:
                return None
            line, _ = listener.accept()
            if os.fork() == 0:
                return become_worker(line), line
            line.close()


def become_worker(line: socket.socket) -> list[str]:
    """Take the environment, folder and standard files that the launcher has; return the words for Ray's worker."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(line, 8, 3)
    with line.makefile("rb") as read:
        words, environment, folder = json.loads(read.read(int.from_bytes(size, "big")))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    own = [word for word in words if word.startswith("--serialized-runtime-env-context=")]
    for word in own:
        os.environ.update(json.loads(word.partition("=")[2])["env_vars"])
    return [word for word in words if word not in own and not word.startswith("--language=")]


def main() -> None:
    """Load, fork for whoever asks, and in a fork be the worker."""
    for name in PRELOADED:
        import_module(name)
    assert "ray" not in sys.modules
    forked = serve(sys.argv[1])
    if forked is not None:
        words, _line = forked
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
