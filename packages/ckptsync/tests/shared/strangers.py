# pyright: basic
"""Processes of another user of this machine, who has no secret; they know what everybody may list."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

NOBODY = 65534
AS_NOBODY = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to start a process of another user")

_BEFORE = f"""
import encodings.idna, json, os, socket, struct, sys, time
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""


def run_stranger(script: str, *arguments: object) -> str:
    """Run a script as nobody to its end, and return what it printed."""
    done = subprocess.run(
        _command(script, arguments), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def stranger_at_work(script: str, *arguments: object) -> Generator[None]:
    """Let a script run as nobody meanwhile; it prints a line when it has begun."""
    process = subprocess.Popen(_command(script, arguments), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), "it ended before it had begun"
        yield
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


def _command(script: str, arguments: tuple[object, ...]) -> list[str]:
    return [sys.executable, "-I", "-c", _BEFORE + script, *map(str, arguments)]
