"""Processes of a bench: run with a deadline, and ended with everything that they started when the bench ends.

`guarded` makes the bench the reaper of its descendants (Linux, PR_SET_CHILD_SUBREAPER): a process whose parent has ended,
as Ray's and vLLM's often have, stays a descendant, whatever session or group it is in. On Ctrl-C, on SIGTERM and at the
end all descendants are killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
_CLEAN_UP_S = 4.0  # for `finally` blocks after a signal
_END_S = 5.0


class BenchError(Exception):
    """A part could not be measured; the message says which, why, and what to do."""


def say(text: str) -> None:
    """Report progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def guarded(main: Callable[[], int], *, adopts: bool = True) -> int:
    """Return the exit code of `main`; however it ends, no process that it started is left.

    Without `adopts` orphans are init's, as they are where no bench runs: Ray's workers look for that.
    """
    if adopts and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        return main()
    except KeyboardInterrupt:
        return 130
    finally:
        end_all(os.getpid())


def _interrupt(number: int, _: FrameType | None) -> None:
    """Kill all descendants and let `finally` blocks run, for a few seconds at most."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_exit_late, args=(128 + number,), daemon=True).start()
    end_all(os.getpid())
    raise KeyboardInterrupt


def _exit_late(code: int) -> None:
    time.sleep(_CLEAN_UP_S)
    end_all(os.getpid())
    os._exit(code)


def descendants(root: int) -> list[int]:
    """Return all living descendants of process `root`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # "pid (name) state ppid ..."; a name may hold blanks and brackets.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def end_all(root: int) -> None:
    """Kill the descendants of `root`, and those that they still start, until there are none."""
    deadline_s = time.monotonic() + _END_S
    while (left := descendants(root)) and time.monotonic() < deadline_s:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@contextmanager
def started(
    command: Sequence[str], output: IO[bytes], errors: IO[bytes] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """Give a process that runs `command` in a session of its own, with stdout to `output` and stderr there or to `errors`.

    At the end it is killed, if it still runs, and what it has started.
    """
    process = subprocess.Popen(command, stdout=output, stderr=errors or output, start_new_session=True)
    try:
        yield process
    finally:
        family = descendants(process.pid)
        process.kill()
        for pid in family:
            end_all(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def run_within(
    timeout_s: float, command: list[str], output: IO[bytes], errors: IO[bytes] | None = None
) -> int:
    """Run `command` as `started` does and return its exit code.

    Raises:
        BenchError: it took longer than `timeout_s` and was killed.
    """
    with started(command, output, errors) as process:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise BenchError(
                f"{' '.join(command[:3])} took more than {timeout_s:g} s and was killed; use fewer --steps, or look "
                f"at {output.name}"
            ) from error


def git(*arguments: str) -> str:
    """Return what git says of this checkout, "" where it is none or git is not there."""
    with suppress(OSError, subprocess.TimeoutExpired):
        folder = Path(__file__).resolve().parent
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout.strip()
    return ""


def tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of the log at `path`, with its address."""
    last = path.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"({path})", *last])
