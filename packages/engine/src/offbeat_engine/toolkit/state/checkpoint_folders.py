"""Folders that are whole or absent: written beside, flushed, renamed last."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, cast

from offbeat_engine.errors import CheckpointError, ConfigError

META = "engine.json"
_STEP = re.compile(r"step_(\d+)")
_LEFT = re.compile(r"\.step_\d+\.(partial|removed)")


def partial_path(final: Path) -> Path:
    """Return where the folder `final` is written before it is whole; no search takes that name for one."""
    return final.with_name(f".{final.name}.partial")


def start_folder(final: Path) -> Path:
    """Make an empty partial folder for `final`, dropping what an earlier crash, or a full disk, left there and of other steps."""
    partial = partial_path(final)
    shutil.rmtree(partial, ignore_errors=True)
    for left in final.parent.glob(".step_*") if step_of(final.name) is not None else ():
        # Of a folder of checkpoints, in which one save ends before the next begins.
        if _LEFT.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish_folder(final: Path) -> None:
    """Flush the partial folder of `final` to disk and give it its name, replacing what had it."""
    partial = partial_path(final)
    for path in [*partial.rglob("*"), partial]:
        _flush(path)
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)  # a folder that is not empty cannot be renamed over
    partial.rename(final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def step_path(root: str | Path, step: int) -> Path:
    """Return the folder of checkpoint `step` under `root`."""
    return Path(root) / f"step_{step}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint folder's name, None if it is no such name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def whole_steps(root: str | Path) -> list[int]:
    """Return the steps of all whole checkpoints in the local folder `root`, ascending; [] when there is none."""
    if not Path(root).is_dir():
        return []
    found = ((step_of(path.name), path) for path in Path(root).iterdir())
    return sorted(step for step, path in found if step is not None and (path / META).is_file())


def read_meta(folder: Path) -> dict[str, Any]:
    """Return what `folder` says of itself.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        said = json.loads((folder / META).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / META} cannot be read ({error}); use another checkpoint") from error
    if not isinstance(said, dict):
        raise CheckpointError(f"{folder / META} should hold a JSON object, got {said!r}")
    return cast("dict[str, Any]", said)


def next_order(root: str | Path) -> int:
    """Return the number that says of the next checkpoint in `root` that it is written after all others there."""
    return 1 + max((_order(root, step) for step in whole_steps(root)), default=0)


def _order(root: str | Path, step: int) -> int:
    """Return when a checkpoint was written; 0, the first, where it does not say, or is damaged: no reason not to write others."""
    try:
        return int(read_meta(step_path(root, step)).get("order", 0))
    except (CheckpointError, TypeError, ValueError):
        return 0


def check_keep(keep: int | None) -> None:
    """Refuse to keep no checkpoint at all.

    Raises:
        ConfigError: `keep` is less than 1.
    """
    if keep is not None and keep < 1:
        raise ConfigError(f"`max_ckpt_to_keep` must be at least 1, got {keep}; use None to keep all")


def prune(root: str | Path, keep: int) -> None:
    """Remove all but the `keep` whole checkpoints in the local folder `root` that were written last.

    Written last, not of the highest step: in a folder that an older run has left, that would be the older run's.
    """
    check_keep(keep)
    for step in sorted(whole_steps(root), key=lambda step: (_order(root, step), step))[:-keep]:
        doomed = step_path(root, step)
        # Renamed first: a crash in the middle of the removal must not leave half a checkpoint under its name.
        hidden = doomed.with_name(f".{doomed.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)
        doomed.rename(hidden)
        shutil.rmtree(hidden)
