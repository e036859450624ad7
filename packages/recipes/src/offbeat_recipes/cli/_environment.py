"""What the libraries below read from the environment when they are imported. Set here, and nowhere else."""

from __future__ import annotations

import os
import resource
import secrets
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

_WANTED = {
    # `uv run` in front of the command would make Ray pack the folder and start every worker through uv again.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers that Ray starts ahead have no environment of a run, and none of its processes could use them.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # workers do the work here: they must not yield to everything else
    # What Ray gives its processes to start (30 s and a minute) is too little on a busy machine; nobody waits longer than needed.
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # Threads that wait for each other give the core away soon: ranks, replicas and the driver share the cores here,
    # and with the default a step of two threads took three times the CPU time on a busy machine.
    "GOMP_SPINCOUNT": "1000",
    # The C library copies past the caches from half a MiB on. By itself it does from a size that it takes from the cache, and a
    # virtual machine may tell it of its host's: 190 MB on one where a sync of weights then took a quarter longer.
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x80000",
    "TOKENIZERS_PARALLELISM": "false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}

_PLENTY = 65536  # open files
# Of 107 bytes (unix(7)): "/ray/session_2026-11-22_19-08-20_123456_1234567/sockets/plasma_store" takes 68.
_RAY_ROOM_BYTES = 39


def prepare_environment() -> None:
    """Set what is not set yet, before Ray or a model library is imported; child processes inherit it."""
    _allow_open_files()
    # Ray's sockets lie in folders of its own, with names that leave little of what a socket's name may have. Where TMPDIR is not
    # there, Python takes another folder, and Ray makes it.
    temporary = os.environ.get("TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(temporary)) > _RAY_ROOM_BYTES and os.access("/tmp", os.W_OK):
        os.environ.setdefault("RAY_TMPDIR", "/tmp")
    for name, value in _WANTED.items():
        os.environ.setdefault(name, value)
    # A Ray that was started with a token refuses drivers that do not say so; those without one take no offence. Once
    # imported, Ray has taken its mode and only its children would see another: it would refuse its own driver.
    if "ray" not in sys.modules and not _has_token() and not _home_takes_files():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray would write one into the home, and stop
    if "ray" not in sys.modules and _has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def speak_utf8() -> None:
    """Start this process anew in Python's UTF-8 mode where the locale is ASCII: names of files would not survive in that.

    For commands, before they have done anything.
    """
    if sys.getfilesystemencoding().lower() in ("ascii", "us-ascii") and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _has_token() -> bool:
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return True
    with suppress(RuntimeError, OSError):  # there may be no home
        return (Path.home() / ".ray" / "auth_token").is_file()
    return False


def _home_takes_files() -> bool:
    with suppress(RuntimeError):
        home = Path.home()
        # `os.access` says yes to root on any file system; a folder says what it takes.
        with suppress(OSError), tempfile.TemporaryFile(dir=home):
            return True
    return False


def _allow_open_files() -> None:
    """Let this process, and those it starts, open as many files as it may allow itself, up to what is plenty."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _PLENTY if hard == resource.RLIM_INFINITY else min(_PLENTY, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
