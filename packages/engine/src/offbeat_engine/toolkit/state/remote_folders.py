"""Checkpoint folders copied to and from any fsspec URL; the marker, written last, says that a copy is whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from offbeat_engine.errors import CheckpointError
from offbeat_engine.toolkit.state.checkpoint_folders import (
    META,
    check_keep,
    finish_folder,
    read_meta,
    start_folder,
    step_of,
    step_path,
)
from offbeat_engine.toolkit.state.file_entries import check_entries, entry_of, in_threads, read_entries

if TYPE_CHECKING:
    from pathlib import Path

    from offbeat_engine.toolkit.state.file_entries import Entry

MARKER = "COMPLETE"


def _open(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    file_system, path = url_to_fs(url)
    return file_system, str(path).rstrip("/")


def upload(folder: Path, remote_root: str) -> None:
    """Copy a whole folder under `remote_root` (an fsspec URL), several files at a time, its marker last.

    Object stores have no rename, so the marker plays its part: it lists every file with size and digest, is removed
    before anything is overwritten, and a folder without it is not a checkpoint.
    """
    file_system, root = _open(remote_root)
    target = f"{root}/{folder.name}"
    order = 1 + max((_order(file_system, root, step) for step in remote_steps(remote_root)), default=0)
    if file_system.exists(target):
        if file_system.exists(f"{target}/{MARKER}"):
            file_system.rm_file(f"{target}/{MARKER}")
        file_system.rm(target, recursive=True)
    file_system.makedirs(target, exist_ok=True)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for parent in sorted({name.rpartition("/")[0] for name in names} - {""}):
        file_system.makedirs(f"{target}/{parent}", exist_ok=True)
    known = read_entries(read_meta(folder).get("files", {}), str(folder))

    def put(name: str) -> Entry:
        # The digest from when the file was written, not of what lies there now.
        entry = known[name] if name in known else entry_of(folder / name)
        file_system.put_file(str(folder / name), f"{target}/{name}")
        return entry

    entries = dict(zip(names, in_threads(put, names), strict=True))
    file_system.pipe_file(
        f"{target}/{MARKER}", json.dumps({"format": 2, "order": order, "files": entries}).encode()
    )


def _read_marker(file_system: Any, root: str, step: int) -> tuple[int, dict[str, Entry]]:
    """Return when a checkpoint was copied (0 where it does not say, 1 the first) and the entries of its files."""
    source = f"{root}/step_{step}/{MARKER}"
    try:
        said = json.loads(file_system.cat_file(source))
    except ValueError as error:
        raise CheckpointError(f"{source} is not JSON ({error}); upload the checkpoint again") from error
    if not isinstance(said, dict):
        raise CheckpointError(
            f"{source} should hold a JSON object, got {said!r}; upload the checkpoint again"
        )
    if isinstance(said.get("files"), dict):
        return int(said.get("order", 0)), read_entries(said["files"], source)
    return 0, read_entries(said, source)  # as it was before there were digests


def _order(file_system: Any, root: str, step: int) -> int:
    """As in `checkpoint_folders`."""
    try:
        return _read_marker(file_system, root, step)[0]
    except (CheckpointError, TypeError, ValueError):
        return 0


def remote_steps(remote_root: str) -> list[int]:
    """Return the steps of all whole checkpoints under the fsspec URL `remote_root`, ascending."""
    file_system, root = _open(remote_root)
    if not file_system.exists(root):
        return []
    names = [str(path).rstrip("/").rpartition("/")[2] for path in file_system.ls(root, detail=False)]
    steps = [step for name in names if (step := step_of(name)) is not None]
    return sorted(step for step in steps if file_system.exists(f"{root}/step_{step}/{MARKER}"))


def download(remote_root: str, step: int, local_root: str | Path) -> Path:
    """Copy checkpoint `step` from `remote_root` to `local_root`, where it appears only when whole.

    Every file is compared with size and digest of the marker before the folder gets its name; nothing is unpickled.

    Raises:
        CheckpointError: a file is not what the marker says, or the marker names files outside the checkpoint.
    """
    file_system, root = _open(remote_root)
    final = step_path(local_root, step)
    source = f"{root}/{final.name}"
    _, entries = _read_marker(file_system, root, step)
    if META not in entries:
        raise CheckpointError(f"{source}/{MARKER} does not name {META}; upload the checkpoint again")
    partial = start_folder(final)
    for name in entries:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)

    def get(name: str) -> None:
        file_system.get_file(f"{source}/{name}", str(partial / name))
        check_entries(partial, {name: entries[name]}, source)

    in_threads(get, entries)
    finish_folder(final)
    return final


def prune_remote(remote_root: str, keep: int) -> None:
    """Remove all but the `keep` whole checkpoints under `remote_root` that were copied last, each marker first."""
    check_keep(keep)
    file_system, root = _open(remote_root)
    orders = {step: _order(file_system, root, step) for step in remote_steps(remote_root)}
    for step in sorted(orders, key=lambda step: (orders[step], step))[:-keep]:
        file_system.rm_file(f"{root}/step_{step}/{MARKER}")
        file_system.rm(f"{root}/step_{step}", recursive=True)
