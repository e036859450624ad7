"""What goes between the driver and the processes that call what users wrote.

A frame is a length (8 bytes, little-endian), then a pickle; both ends are this package on this machine, joined by a pipe
that nobody else has. In go a `Setup`, then lists of `Call`s; out come lists of `Answer`s, one a call, in any order. What runs over
there may be code that a model wrote, so the driver takes nothing from there but answers of plain values.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, BinaryIO, cast

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH = struct.Struct("<q")
RAISED, TIMED_OUT, DIED, NO_NUMBER, LOST = "raised", "timed out", "died", "not a number", "lost"
NONE_APPLIES = "none applies"
READY = ""
"""In place of a path: nothing is called, and the answer says that functions can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Which functions there are and where modules are looked for, how many calls run at a time, and how long one may take.

    `args` are what an environment is made with.
    """

    paths: tuple[str, ...]
    search: tuple[str, ...]
    concurrency: int
    timeout_s: float
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])


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


class _Answers(pickle.Unpickler):
    """Makes nothing but what answers are of: a pickle may name any function to be called while it is read."""

    def find_class(self, module: str, name: str, /) -> Any:  # noqa: ANN401 - as in pickle
        if (module, name) not in (
            (__name__, "Answer"),
            ("offbeat_trainer.rollouts.environment", "Feedback"),
        ):
            raise pickle.UnpicklingError(f"an answer may not hold {module}.{name}")
        return super().find_class(module, name)


def read_answers(body: bytes) -> list[Answer]:
    """Return the answers in the body of a frame.

    Raises:
        UnpicklingError: there is more in it than answers of plain values.
    """
    return _Answers(io.BytesIO(body)).load()


def plain(value: Any, known: type | None = None) -> Any:  # noqa: ANN401 - as it came
    """Return `value` with its numbers as Python's; what is no plain value is made text.

    With a `known` dataclass, one of plain values is kept, and what is no plain value is a TypeError.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):  # arrays and tensors, of one element and of many
        return value.tolist()
    if known is not None and isinstance(value, known):
        return known(
            **{one.name: plain(getattr(value, one.name), known) for one in fields(cast("Any", known))}
        )
    if isinstance(value, Mapping):
        return {
            plain(name, known): plain(one, known)
            for name, one in cast("Mapping[object, object]", value).items()
        }
    if isinstance(value, Sequence):
        return [plain(one, known) for one in cast("Sequence[object]", value)]
    try:
        return float(value)
    except (TypeError, ValueError):
        if known is not None:
            raise TypeError(f"what was returned cannot be sent: {value!r:.200}") from None
        return repr(value)  # said in the refusal


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
