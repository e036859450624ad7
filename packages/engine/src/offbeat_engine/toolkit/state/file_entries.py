"""What a checkpoint says of its files: sizes and digests, taken when they are written and compared before they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping  # noqa: TC003
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import xxhash

from offbeat_engine.errors import CheckpointError

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
