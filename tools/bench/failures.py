"""What the bench says when something does not work."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class BenchError(Exception):
    """One side could not be measured; the message says which, why, and what to do."""


def tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of the log at `path`, with its address."""
    last = path.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"({path})", *last])
