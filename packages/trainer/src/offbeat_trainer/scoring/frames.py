"""What goes between the driver and the processes that call what users wrote.

A frame is a length (8 bytes, little-endian), then a pickle; both ends are this package on this machine, joined by a pipe
that nobody else has. In go a `Setup`, then lists of `Call`s; out come lists of `Answer`s, one a call, in any order.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LENGTH = struct.Struct("<q")
RAISED, TIMED_OUT, DIED, NO_NUMBER, LOST = "raised", "timed out", "died", "not a number", "lost"
NONE_APPLIES = "none applies"
READY = ""
"""In place of a path: nothing is called, and the answer says that functions can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Which functions there are and where modules are looked for, how many calls run at a time, and how long one may take."""

    paths: tuple[str, ...]
    search: tuple[str, ...]
    concurrency: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call function `path`, or none (`READY`), with `arguments`."""

    number: int
    path: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What call `number` came to: `value`, or `failure` (one of RAISED, TIMED_OUT, DIED, LOST) and what is known of it."""

    number: int
    value: Any = None
    failure: str = ""
    detail: str = ""


def read_answers(body: bytes) -> list[Answer]:
    """Return the answers in the body of a frame."""
    return pickle.loads(body)


def read_frame(stream: BinaryIO) -> Any | None:  # noqa: ANN401 - whatever was written
    """Return what the other end wrote next, or None once it is gone."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return pickle.loads(body) if len(body) == size else None


def frame(value: object) -> bytes:
    """Return `value` as it goes over a pipe."""
    body = pickle.dumps(value)
    return LENGTH.pack(len(body)) + body


def over_there() -> tuple[BinaryIO, Callable[[Sequence[Answer]], None]]:
    """Return where calls come from and what sends answers, from any thread; what is printed goes where errors go from now on."""
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    one_at_a_time = threading.Lock()

    def answer(several: Sequence[Answer]) -> None:
        try:
            framed = frame(several)
        except Exception as error:  # noqa: BLE001 - whatever a user's value does when it is pickled
            detail = f"what was returned cannot be sent: {type(error).__name__}: {error}"
            framed = frame([Answer(number=one.number, failure=RAISED, detail=detail) for one in several])
        with one_at_a_time:
            outgoing.write(framed)
            outgoing.flush()

    return sys.stdin.buffer, answer
