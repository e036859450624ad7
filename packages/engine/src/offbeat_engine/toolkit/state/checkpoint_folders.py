"""Folders that are whole or absent: written beside, flushed, renamed last."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping  # noqa: TC003
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast

import xxhash

from offbeat_engine.errors import CheckpointError, ConfigError

T = TypeVar("T")

# Size in bytes, and xxh3-128 in hex; None where a checkpoint was written before there were digests.
Entry = tuple[int, str | None]

_BLOCK = 1 << 20
_THREADS = 8


def entry_of(path: Path) -> Entry:
    """Return size and digest of the file at `path`, read in blocks."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def entries_of(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Return what there is to say of the files `names` (relative to `folder`)."""
    listed = list(names)
    return dict(zip(listed, in_threads(lambda name: entry_of(folder / name), listed), strict=True))


def check_entries(folder: Path, entries: Mapping[str, Entry], source: str) -> None:
    """Compare files in `folder` with `entries`, several at a time.

    Raises:
        CheckpointError: a file of `source` (how the message calls it) is missing, or is not what was written.
    """

    def check(name: str) -> None:
        size, digest = entries[name]
        path = folder / name
        if not path.is_file():
            raise CheckpointError(
                f"{source}/{name} should have {size} bytes, but there is no such file; restore it from a copy"
            )
        got = path.stat().st_size
        if got != size:
            raise CheckpointError(
                f"{source}/{name} should have {size} bytes, got {got}; restore it from a copy"
            )
        if digest is not None and entry_of(path)[1] != digest:
            raise CheckpointError(
                f"{source}/{name} has the right size, but other bytes than were written (digest {digest}); "
                "restore it from a copy"
            )

    in_threads(check, entries)


def read_entries(said: Mapping[str, Any], source: str) -> dict[str, Entry]:
    """Return the entries that a checkpoint's JSON `said`: [size, digest] by file, or the size alone in older ones.

    Raises:
        CheckpointError: it is no such thing, or a name leads out of the checkpoint's folder.
    """
    entries: dict[str, Entry] = {}
    for name, entry in said.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or name != str(path) or "\\" in name:
            raise CheckpointError(
                f"{source} names the file {name!r}, which is not inside the checkpoint; do not trust it"
            )
        match entry:
            case int():
                entries[name] = (entry, None)
            case [int() as size, str() as digest]:
                entries[name] = (size, digest)
            case _:
                raise CheckpointError(
                    f"{source} should say [size, digest] of {name}, got {entry!r}; write the checkpoint again"
                )
    return entries


def in_threads(act: Callable[[str], T], names: Iterable[str]) -> list[T]:
    """Run `act` on each name, several at a time; return the results in order, or raise the first error."""
    # No executor: those refuse work once the interpreter ends, when a save may still be under way.
    listed = list(names)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    waiting, lock = iter(enumerate(listed)), threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                number, name = next(waiting, (-1, ""))
            if number < 0:
                return
            try:
                results[number] = act(name)
            except Exception as error:  # noqa: BLE001 raised below, in the caller's thread
                errors[number] = error

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_THREADS, len(listed)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(listed))]


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
    order = 1 + max((_upload_order(file_system, root, step) for step in remote_steps(remote_root)), default=0)
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


def _upload_order(file_system: Any, root: str, step: int) -> int:
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
    orders = {step: _upload_order(file_system, root, step) for step in remote_steps(remote_root)}
    for step in sorted(orders, key=lambda step: (orders[step], step))[:-keep]:
        file_system.rm_file(f"{root}/step_{step}/{MARKER}")
        file_system.rm(f"{root}/step_{step}", recursive=True)
