"""The journal as files that are only appended to: for run folders that several hosts share.

SQLite's WAL mode needs memory that all who open the file share, and does not work over a network file system
(sqlite.org/wal.html). One process that appends to files of its own does. A folder holds segments `000001.log`,
`000002.log`, ...; every process that writes begins a new one, and so does `forget` when one has grown
large.

A segment is a row of frames: length and CRC-32 of the rest, 4 bytes each, little-endian; then a line of JSON (kind,
number, version, detail) and, where the event has completions, a line feed and what `sqlite.pack` made of them. A frame
that is cut short at the end of a segment is what a kill in the middle of a write leaves; it was never acknowledged.

An append is an ordinary write: it outlives a killed process at once. What survives a power cut is everything up to the
last `forget`, which is called with every checkpoint and flushes to disk.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from zlib import crc32

from offbeat_trainer.errors import ResumeError, TrainerError
from offbeat_trainer.stream.journal.sqlite import from_row, to_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from offbeat_trainer.stream.journal.events import Event
    from offbeat_trainer.stream.journal.sqlite import Row

SEGMENT_BYTES = 8 << 20
_HEAD = struct.Struct("<II")
_SUFFIX = ".log"


@dataclass(slots=True)
class _Segment:
    """A file of the journal, and the groups whose completions it holds."""

    path: Path
    held: set[int] = field(default_factory=set[int])


class SegmentJournal:
    """Satisfies `Journal` with a folder of segments."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open `folder`, or make it; nothing is written before the first event.

        Raises:
            ResumeError: a file in it is not a segment, or is damaged before its end.
        """
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._file: int | None = None
        self._lock = threading.Lock()  # of the file
        self._size = 0
        self._taken: dict[int, tuple[int, ...]] = {}
        self._dropped: set[int] = set()
        self._segments = [self._read_in(path) for path in sorted(folder.glob(f"*{_SUFFIX}"))]

    def write(self, event: Event) -> None:
        """See `Journal.write`.

        Raises:
            TrainerError: the disk did not take it; what was written before is as it was.
        """
        with self._lock:
            self._write(to_row(event))

    def flush(self) -> None:
        """See `Journal.flush`; each event is there once it is written."""

    def _write(self, row: Row) -> None:
        if self._file is None:
            self._begin_segment()
            assert self._file is not None
        frame = _frame(row)
        try:
            _write_all(self._file, frame)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise TrainerError(
                f"the journal {self._segments[-1].path} could not be written ({error}); make room, then resume"
            ) from error
        self._size += len(frame)
        self._note(self._segments[-1], row)

    def events(self) -> Iterator[Event]:
        """See `Journal.events`."""
        for segment in list(self._segments):
            for row in _rows(segment.path):
                yield from_row(row)

    def forget(self, before_step: int) -> None:
        """See `Journal.forget`; each segment that holds such completions is written anew, whole or not at all."""
        with self._lock:
            self._forget(before_step)

    def _forget(self, before_step: int) -> None:
        steps = [step for step in self._taken if step < before_step]
        over = {index for step in steps for index in self._taken.pop(step)} | self._dropped
        self._dropped = set()
        if self._file is not None:
            os.fsync(self._file)
        for segment in self._segments:
            if segment.held & over:
                kept = (_without(row, over) for row in _rows(segment.path))
                _replace(segment.path, kept)
                segment.held -= over
        if self._file is not None:
            self._reopen()

    def close(self) -> None:
        """See `Journal.close`."""
        if self._file is not None:
            self._end_segment()

    def _read_in(self, path: Path) -> _Segment:
        segment = _Segment(path)
        for row in _rows(path):
            self._note(segment, row)
        return segment

    def _note(self, segment: _Segment, row: Row) -> None:
        kind, number, _, detail, body = row
        if body is not None:
            segment.held.add(number)
        if kind == "taken":
            self._taken[number] = tuple(json.loads(detail or "[]"))
        elif kind == "dropped":
            self._dropped.add(number)

    def _begin_segment(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(segment.path.stem) for segment in self._segments), default=0)
        path = self._folder / f"{number:06d}{_SUFFIX}"
        # Exclusive: a second writer, which the lock of the run folder should have kept out, is met here at the latest.
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError as error:
            raise TrainerError(
                f"{path} was begun by another process; one at a time writes a journal, so end the other run first"
            ) from error
        _flush_folder(self._folder)
        self._segments.append(_Segment(path))
        self._size = 0

    def _reopen(self) -> None:
        """Go on in the newest segment, which may have been written anew, or begin another where it is large."""
        self._end_segment()
        path = self._segments[-1].path
        size = path.stat().st_size
        if size < self._segment_bytes:
            self._file, self._size = os.open(path, os.O_WRONLY | os.O_APPEND), size

    def _end_segment(self) -> None:
        assert self._file is not None
        file, self._file = self._file, None
        os.fsync(file)
        os.close(file)


def _without(row: Row, over: set[int]) -> Row:
    """Return `row` without its completions if they are of one of the groups that are `over`."""
    return (*row[:4], None) if row[4] is not None and row[1] in over else row


def _frame(row: Row) -> bytes:
    *line, body = row
    payload = json.dumps(line).encode()
    if body is not None:
        payload = b"\n".join([payload, body])
    return _HEAD.pack(len(payload), crc32(payload)) + payload


def _rows(path: Path) -> Iterator[Row]:
    """Yield what `path` holds up to its end, or up to a frame that was cut short there."""
    data = path.read_bytes()
    start = 0
    while start + _HEAD.size <= len(data):
        length, check = _HEAD.unpack_from(data, start)
        end = start + _HEAD.size + length
        if end > len(data):
            return
        payload = data[start + _HEAD.size : end]
        if not length or crc32(payload) != check:
            if not any(data[start:]):  # room that was made and never filled, after a power cut
                return
            raise ResumeError(
                f"{path} is damaged at byte {start}, or no journal; without {path.parent} the run can be started anew"
            )
        line, feed, body = payload.partition(b"\n")
        yield cast("Row", (*json.loads(line), body if feed else None))
        start = end


def _replace(path: Path, rows: Iterable[Row]) -> None:
    """Write `rows` in place of what `path` holds, whole or not at all."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        for row in rows:
            file.write(_frame(row))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _flush_folder(path.parent)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
