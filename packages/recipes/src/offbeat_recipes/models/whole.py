"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def make_whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a folder beside `folder` and rename it last; whoever finds `folder` finds it whole.

    Another process may make the same folder at the same time: the first one wins, the other's is dropped.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)  # of a killed process that had the same id
    beside.mkdir(parents=True)
    try:
        fill(beside)
        _put(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # gone already if it was put in place


def _put(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
