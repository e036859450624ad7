"""Folders that are whole or absent: written beside, flushed, renamed last; copied through fsspec, marker last."""

# fsspec is untyped: a file system answers with whatever its backend does.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from offbeat_engine.errors import CheckpointError

MARKER = "COMPLETE"
META = "engine.json"
_STEP = re.compile(r"step_(\d+)")


def partial_path(final: Path) -> Path:
    """Return where the folder `final` is written before it is whole; no search takes that name for one."""
    return final.with_name(f".{final.name}.partial")


def start_folder(final: Path) -> Path:
    """Make an empty partial folder for `final`, dropping what an earlier crash left there."""
    partial = partial_path(final)
    shutil.rmtree(partial, ignore_errors=True)
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


def whole_steps(root: str | Path) -> list[int]:
    """Return the steps of all whole checkpoints in the local folder `root`, ascending; [] when there is none."""
    if not Path(root).is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in Path(root).iterdir())
    return sorted(int(match[1]) for match, path in found if match and (path / META).is_file())


def newest_checkpoint(root: str | Path) -> Path | None:
    """Return the folder of the newest whole checkpoint in `root`, or None."""
    steps = whole_steps(root)
    return step_path(root, steps[-1]) if steps else None


def prune(root: str | Path, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints in the local folder `root`."""
    for step in whole_steps(root)[: -keep or None]:
        doomed = step_path(root, step)
        # Renamed first: a crash in the middle of the removal must not leave half a checkpoint under its name.
        hidden = doomed.with_name(f".{doomed.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)
        doomed.rename(hidden)
        shutil.rmtree(hidden)


def _open(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    file_system, path = url_to_fs(url)
    return file_system, str(path).rstrip("/")


def upload(folder: Path, remote_root: str) -> None:
    """Copy a whole folder under `remote_root` (an fsspec URL), its marker of completeness last.

    Object stores have no rename, so the marker plays its part: it lists every file with its size, is removed
    before anything is overwritten, and a folder without it is not a checkpoint.
    """
    file_system, root = _open(remote_root)
    target = f"{root}/{folder.name}"
    if file_system.exists(target):
        if file_system.exists(f"{target}/{MARKER}"):
            file_system.rm_file(f"{target}/{MARKER}")
        file_system.rm(target, recursive=True)
    file_system.makedirs(target, exist_ok=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes: dict[str, int] = {}
    for path in files:
        name = path.relative_to(folder).as_posix()
        if "/" in name:
            file_system.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
        file_system.put_file(str(path), f"{target}/{name}")
        sizes[name] = path.stat().st_size
    file_system.pipe_file(f"{target}/{MARKER}", json.dumps(sizes).encode())


def remote_steps(remote_root: str) -> list[int]:
    """Return the steps of all whole checkpoints under the fsspec URL `remote_root`, ascending."""
    file_system, root = _open(remote_root)
    if not file_system.exists(root):
        return []
    names = [str(path).rstrip("/").rpartition("/")[2] for path in file_system.ls(root, detail=False)]
    matches = (match for match in map(_STEP.fullmatch, names) if match)
    return sorted(int(match[1]) for match in matches if file_system.exists(f"{root}/{match[0]}/{MARKER}"))


def download(remote_root: str, step: int, local_root: str | Path) -> Path:
    """Copy checkpoint `step` from `remote_root` to `local_root`, where it appears only when whole.

    Raises:
        CheckpointError: a file is not as long as the marker says.
    """
    file_system, root = _open(remote_root)
    final = step_path(local_root, step)
    source = f"{root}/{final.name}"
    sizes: dict[str, int] = json.loads(file_system.cat_file(f"{source}/{MARKER}"))
    partial = start_folder(final)
    for name, num_bytes in sizes.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        file_system.get_file(f"{source}/{name}", str(partial / name))
        got = (partial / name).stat().st_size
        if got != num_bytes:
            raise CheckpointError(
                f"{source}/{name} should have {num_bytes} bytes, got {got}; upload it again"
            )
    finish_folder(final)
    return final


def prune_remote(remote_root: str, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints under `remote_root`, each marker first."""
    file_system, root = _open(remote_root)
    for step in remote_steps(remote_root)[: -keep or None]:
        file_system.rm_file(f"{root}/step_{step}/{MARKER}")
        file_system.rm(f"{root}/step_{step}", recursive=True)
