"""Running a side, and what the bench says when that does not work."""

from __future__ import annotations

import subprocess
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class BenchError(Exception):
    """One side could not be measured; the message says which, why, and what to do."""


def run_within(timeout_s: float, command: list[str], output: IO[bytes]) -> int:
    """Run `command` with stdout and stderr to `output` and return its exit code.

    Raises:
        BenchError: it took longer than `timeout_s` and was killed.
    """
    try:
        return subprocess.run(
            command, stdout=output, stderr=output, timeout=timeout_s, check=False
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise BenchError(
            f"{' '.join(command[:3])} took more than {timeout_s:g} s and was killed; use fewer --steps, or look at "
            f"{output.name}"
        ) from error


def tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of the log at `path`, with its address."""
    last = path.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"({path})", *last])
