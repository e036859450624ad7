"""What the libraries below read from the environment when they are imported. Set here, and nowhere else."""

from __future__ import annotations

import argparse
import gc
import os
import resource
import secrets
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_rollout.toolkit.folders import HeldFolder

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

USAGE = 2  # exit code of everything that is refused before it starts

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

_TOKENS = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
_PLENTY = 65536  # open files
_PREFIX = "offbeat-ray-"
# Of 107 bytes (unix(7)): "/ray/session_2026-11-22_19-08-20_123456_1234567/sockets/plasma_store" takes 68, our own folder 21.
_RAY_ROOM_BYTES = 18


def prepare_environment(ray_address: str = "") -> None:
    """Set what is not set yet, before Ray or a model library is imported; child processes inherit it.

    A Ray of the run's own (no `ray_address`) has a token that no file holds: Ray would write one into the home, where
    others may read it, and who has it runs code as the user of the run.
    """
    _allow_open_files()
    for name, value in _WANTED.items():
        os.environ.setdefault(name, value)
    with suppress(RuntimeError):  # there may be no home
        # By itself torch compiles to, and loads code from, a folder under /tmp whose name anybody can guess.
        os.environ.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "offbeat" / "torchinductor")
        )
    if (
        "ray" in sys.modules
    ):  # it has taken its mode: only its children would see another, and refuse their own driver
        return
    if not ray_address and not _TOKENS & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # A Ray that was started with a token refuses drivers that do not say so; those without one take no offence.
    if _TOKENS & os.environ.keys() or _token_file() is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


@contextmanager
def without_collector() -> Generator[None]:
    """Import and plan without the garbage collector, and leave out of its later walks what was loaded.

    While libraries are imported it walks through all their objects again and again and finds nothing: a tenth of what a plan takes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def open_token() -> Path | None:
    """Return the file of Ray's token where others than its owner may read it."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else _token_file()
    with suppress(OSError):
        if file is not None and "RAY_AUTH_TOKEN" not in os.environ and file.stat().st_mode & 0o077:
            return file
    return None


@contextmanager
def private_ray() -> Generator[None]:
    """Give the Ray that is started within a folder that no other user may enter, and remove it at the end.

    Ray makes its own folders writable for everybody, wherever they lie: others could move its sockets away, and put a link
    to a file of the user's where it writes a log.
    """
    before = os.environ.get("RAY_TMPDIR")
    where = before or os.environ.get("TMPDIR") or tempfile.gettempdir()
    # Where TMPDIR is not there, Python takes another folder.
    if len(os.fsencode(where)) > _RAY_ROOM_BYTES and os.access("/tmp", os.W_OK):
        where = "/tmp"
    folder = HeldFolder(Path(where), _PREFIX)
    os.environ["RAY_TMPDIR"] = str(folder.path)
    try:
        yield
    finally:
        folder.close()
        if before is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = before


def command_parser(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser of command lines whose help has the lines of `epilog` as they are."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=description, epilog=epilog, formatter_class=raw)


def options_of(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line; None: that of this process, which is no more than the command."""
    if argv is None:
        speak_utf8()
    return made.parse_args(argv)


def speak_utf8() -> None:
    """Start this process anew in Python's UTF-8 mode where the locale is ASCII: names of files would not survive in that.

    For commands, before they have done anything.
    """
    if sys.getfilesystemencoding().lower() in ("ascii", "us-ascii") and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _token_file() -> Path | None:
    with suppress(RuntimeError, OSError):  # there may be no home
        file = Path.home() / ".ray" / "auth_token"
        return file if file.is_file() else None
    return None


def _allow_open_files() -> None:
    """Let this process, and those it starts, open as many files as it may allow itself, up to what is plenty."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _PLENTY if hard == resource.RLIM_INFINITY else min(_PLENTY, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
