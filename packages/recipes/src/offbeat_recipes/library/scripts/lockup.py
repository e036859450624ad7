"""The process in which code is locked up; `code.run_each` starts it with Python alone, before anything else is imported.

It leaves what it has: the file system but for Python and the libraries of the system, which can be read and not written, other processes,
the network, its privileges. Then it runs programs with limits, one after the other. With each one everything ends that it left behind:
its processes, its files, its shared memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_NEW_MOUNTS, _NEW_NAMES, _NEW_MESSAGES, _NEW_USER, _NEW_PIDS, _NEW_NETWORK = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_NOSUID, _NODEV, _NOEXEC, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_SET_ATTRIBUTES = 442  # mount_setattr(2), Linux 5.12
_READ_ONLY = 1 | 2 | 4  # without set-user-id programs and devices
_DETACH = 2  # umount2(2)
_DIE_WITH_PARENT, _NO_NEW_PRIVILEGES = 1, 38  # prctl(2)
_OUTSIDE = 1_000_000_000  # user ids that nobody has
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
_POLL_S = 0.002
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
LOCK_FAILED = 125
"""The exit code where something of this cannot be had; standard error says what."""
LATE = "late"
"""What is written down of a program that took too long, in place of its exit code."""

libc = ctypes.CDLL(None, use_errno=True)


def _done(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [text.encode() for text in (source, target, kind)]
    _done(libc.mount(*words, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def _read_only(path: str, *, below: bool = True) -> None:
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    at = (ctypes.c_long(_SET_ATTRIBUTES), -100, path.encode(), 0x8000 if below else 0)
    _done(libc.syscall(*at, attributes, ctypes.c_size_t(32)), f"make {path} read-only")


def _leave(root: str, keep: list[str]) -> None:
    """Make `root` a file system of what is kept, and the only one."""
    user, group = os.getuid(), os.getgid()
    apart = _NEW_MOUNTS | _NEW_NAMES | _NEW_MESSAGES | _NEW_PIDS | _NEW_NETWORK
    _done(libc.unshare(apart | (_NEW_USER if user else 0)), "namespaces of its own")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"1000 {user} 1")
        Path("/proc/self/gid_map").write_text(f"1000 {group} 1")
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in keep:
        _show(root, path)
    for path in _DEVICES:
        _show(root, path, device=True)
    for name in ("/tmp", "/proc"):
        os.makedirs(root + name, exist_ok=True)


def _show(root: str, path: str, *, device: bool = False) -> None:
    """Show `path` of the machine in `root`."""
    if os.path.islink(path):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(os.readlink(path), root + path)
    elif os.path.isdir(path):
        os.makedirs(root + path, exist_ok=True)
        _mount(path, root + path, "", _BIND | _RECURSIVE)
        _read_only(root + path)
    elif os.path.exists(path):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        Path(root + path).touch()
        _mount(path, root + path, "", _BIND)
        if not device:
            _read_only(root + path)


def _first_process(job: dict[str, Any]) -> int:
    """Run the programs as children of the first process of its own table of processes; write down in `folder` how they end."""
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    folder = os.open(
        job["folder"], os.O_RDONLY
    )  # stays open here, and here alone, when all else of the machine is left
    if job["locked"]:
        root = job["root"]
        with suppress(OSError):  # where a container hides parts of its own; Python can do without
            _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
        _read_only(root, below=False)
        os.chroot(root)
    else:
        os.chdir(job["work"])

    def created(name: str) -> int:
        return os.open(name, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder)

    with open(created("ended"), "w", encoding="utf-8") as ended:
        for number, program in enumerate(job["programs"]):
            output = created(f"output-{number}")
            print(_run(job, program, output), file=ended, flush=True)
            os.close(output)
    return 0


def _run(job: dict[str, Any], program: dict[str, str], output: int) -> int | str:
    """Run one program, which writes to `output`; return its exit code, or `LATE`, when nothing of it is left."""
    if job["locked"]:
        _done(libc.unshare(_NEW_MESSAGES), "shared memory of its own")
        libc.umount2(b"/tmp", _DETACH)  # that of the program before
        _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, f"size={job['files_mib']}m,mode=777")
        os.chdir("/tmp")
    Path("main.py").write_text(program["source"], encoding="utf-8", errors="surrogatepass")
    Path("stdin").write_text(program["stdin"], encoding="utf-8")
    child = os.fork()
    if child == 0:
        _become_program(job, output)
    deadline_s = time.monotonic() + job["seconds"]
    code: int | str = LATE
    while code == LATE and time.monotonic() < deadline_s:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
        elif not ended:
            time.sleep(_POLL_S)
    with suppress(ProcessLookupError):
        os.kill(-1 if job["locked"] else -child, signal.SIGKILL)  # as the first process, all others
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return code


def _become_program(job: dict[str, Any], output: int) -> None:
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    os.setsid()
    for number, file in enumerate((os.open("stdin", os.O_RDONLY), output, output)):
        os.dup2(file, number)
    if os.getuid() == 0 and job["locked"]:
        os.setgroups([])
        alone = _OUTSIDE + job["number"]
        os.setresgid(alone, alone, alone)
        os.setresuid(alone, alone, alone)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for name, limit in job["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    os.execve(job["python"], [job["python"], "-I", "-B", "main.py"], {"LANG": "C.UTF-8"})


def main() -> None:
    """Read what to run from the file named on the command line."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    code = LOCK_FAILED
    try:
        if job["locked"]:
            _leave(job["root"], [*_SYSTEM, *job["keep"]])
        first = os.fork()
        code = _first_process(job) if first == 0 else os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
