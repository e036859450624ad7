# pyright: basic
"""Two hosts on one machine: network namespaces joined by a virtual link that can be cut.

Each has its own loopback and address, its own name, /dev/shm and /tmp/ray, and its own content under one path (`own`). What lies
elsewhere both see. Needs root, `ip`, `unshare` and `nsenter`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

_COMMAND_S = 60.0
_numbers = itertools.count()

# Mounts of its own, then nothing until its input ends: with the test, however that ends.
_HOLD = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
mount --bind "$1" "$2"
hostname "$3"
echo held
cat >/dev/null
"""


class Host:
    """One of two; `root` shows from outside what it has under `own`."""

    def __init__(self, name: str, address: str, namespace: str, root: Path, own: Path) -> None:
        """Hold mounts in a network namespace that is there."""
        self.name = name
        self.address = address
        self.root = root
        self._namespace = namespace
        self._started: list[subprocess.Popen[str]] = []
        for folder in (root, own):
            folder.mkdir(parents=True, exist_ok=True)
        self._holder = subprocess.Popen(
            [
                *_inside(namespace),
                "unshare",
                "--mount",
                "--uts",
                "sh",
                "-c",
                _HOLD,
                "sh",
                str(root),
                str(own),
                name,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        told = self._holder.stdout.readline()
        assert told == "held\n", f"{name} has no mounts of its own: {told!r}"

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Run a command on this host, in a session of its own; `close` ends it, and what it has started."""
        enter = ["nsenter", "--target", str(self._holder.pid), "--mount", "--net", "--uts", "--"]
        process = subprocess.Popen([*enter, *words], text=True, start_new_session=True, **options)
        self._started.append(process)
        return process

    def cut(self) -> None:
        """Take the link down."""
        _ip("-n", self._namespace, "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Bring the link up again."""
        _ip("-n", self._namespace, "link", "set", "eth0", "up")

    def kill(self) -> None:
        """Kill everything that runs here at once, as if the machine had lost its power; its network stays."""
        found = subprocess.run(
            ["ip", "netns", "pids", self._namespace], capture_output=True, text=True, check=False
        )
        for pid in map(int, found.stdout.split()):
            if pid != self._holder.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)

    def close(self) -> None:
        """Kill everything that runs here, and let the mounts go."""
        self.kill()
        for process in [*self._started, self._holder]:
            process.kill()
            process.wait(_COMMAND_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


@contextlib.contextmanager
def two_hosts(folder: Path) -> Generator[tuple[Host, Host]]:
    """Make a near and a far host, and take them away; what they have under `folder`/own is in `folder`/near and /far.

    Raises:
        OSError: this machine does not let us; says what it lacks.
    """
    number = f"{os.getpid()}-{next(_numbers)}"
    names = ("near", "far")
    spaces = [f"offbeat-{name}-{number}" for name in names]
    links = [f"ob{name[0]}{number}"[-15:] for name in names]
    addresses = ["10.213.0.1", "10.213.0.2"]
    hosts: list[Host] = []
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for space, link, address in zip(spaces, links, addresses, strict=True):
            _ip("link", "set", link, "netns", space, "name", "eth0")
            _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        for name, space, address in zip(names, spaces, addresses, strict=True):
            hosts.append(Host(name, address, space, folder / name, folder / "own"))
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.close()
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", links[0]], capture_output=True, check=False)  # never moved


def lacking(folder: Path) -> str:
    """Say why there can be no two hosts here, or "" where there can: by trying, under `folder`."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"two hosts need {', '.join(missing)}"
    try:
        with two_hosts(folder) as (near, far):
            told = near.start("true").wait(_COMMAND_S), far.start("true").wait(_COMMAND_S)
    except (OSError, AssertionError) as error:
        return f"two hosts need root and network namespaces: {error}"
    return "" if told == (0, 0) else "a namespace cannot be entered here"


def _inside(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
