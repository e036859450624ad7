"""Events as rows of plain values, the same in every store."""

from __future__ import annotations

import json
from typing import Any, TypeAlias, assert_never

from offbeat_trainer.data.types import Score
from offbeat_trainer.errors import ResumeError
from offbeat_trainer.stream.journal.codec import ENCODE, pack, unpack
from offbeat_trainer.stream.journal.events import Dropped, Event, Finished, Flipped, Half, Issued, Taken

Row: TypeAlias = tuple[str, int, int | None, str | None, bytes | None]
"""Kind, index of a group or a step, version, what else there is as text, trajectories as bytes."""


def to_row(event: Event) -> Row:
    """Return `event` as a row."""
    match event:
        case Issued():
            return "issued", event.index, event.version, event.uid, None
        case Half():
            return "half", event.index, None, None, pack(event.trajectories)
        case Finished():
            scores = [(one.reward, one.correct, *([one.parts] if one.parts else [])) for one in event.scores]
            detail = ENCODE({"scores": scores, "spans": event.spans})
            return "finished", event.index, event.version, detail, pack(event.trajectories)
        case Taken():
            return "taken", event.step, None, json.dumps(event.indices), None
        case Dropped():
            return "dropped", event.index, None, event.reason, None
        case Flipped():
            return "flipped", event.steps, event.version, None, None
        case _:
            assert_never(event)


def from_row(row: Row) -> Event:
    """Return the event that `row` was made of, without its trajectories if they were taken out.

    Raises:
        ResumeError: it is of a kind that this version does not know, or cannot be read.
    """
    kind, number, version, detail, body = row
    match kind:
        case "issued":
            return Issued(index=number, uid=str(detail), version=version or 0)
        case "half":
            return Half(index=number, trajectories=() if body is None else unpack(body))
        case "finished":
            return _finished(number, version or 0, json.loads(detail or "{}"), body)
        case "taken":
            return Taken(step=number, indices=tuple(json.loads(detail or "[]")))
        case "dropped":
            return Dropped(index=number, reason=str(detail))
        case "flipped":
            return Flipped(steps=number, version=version or 0)
        case _:
            raise ResumeError(
                f"the journal holds an event of kind {kind!r}, which this version does not know"
            )


def _finished(index: int, version: int, detail: dict[str, Any], body: bytes | None) -> Finished:
    return Finished(
        index=index,
        version=version,
        trajectories=() if body is None else unpack(body),
        scores=tuple(
            Score(reward=reward, correct=bool(correct), parts=parts[0] if parts else {})
            for reward, correct, *parts in detail["scores"]
        ),
        spans=tuple(tuple((made_by, count) for made_by, count in one) for one in detail["spans"]),
    )
