"""The journal as one SQLite file in WAL mode (sqlite.org/wal.html), and events as rows of plain values, the same in every store.

A commit appends to the log beside the database with an ordinary write: it outlives a killed process at once. What
survives a power cut is everything up to the last `forget`, which is called with every checkpoint and flushes to disk;
later events belong to steps whose weights such a cut loses, too. One process has the file open at a time, which spares SQLite
the memory that all who open it would share: so it works on file systems that hosts share.

`forget` deletes the rows of groups that are trained or dropped (but the beginnings of dropped ones of the steps to come). The row of the step that took them has as its body a line of JSON:
`begun` and `spans`, see `Taken`. Rows of dropped groups become one a reason, with the indices as its body.

Trajectories are bytes: exact, small, readable without us. A line of JSON comes first, then plain arrays. The line holds
`format`, 2, and, for all completions in order: `count`, their numbers of tokens, their request ids, how they ended, and `spans`:
who made which tokens, rows of (version, start, end). `stop_reason` is there if any has one. Each completion is a trajectory of
its own, unless there is `turns`: per trajectory a row of (tokens observed, reward), one a completion; then `endings` says how the
trajectories ended. The arrays follow, int32 token ids and then float32 log-probs, each over all completions, and int32 ids of
what was observed, little-endian. Where a turn begins a row with a context of its own, its entry of `turns` has the number of that
one's tokens as a third, `format` is 4, and int32 ids of all contexts follow those that were observed. Where experts were recorded, the line says `format` 3, `routed` (layers, experts of a token) and
`fed`, of how many tokens each completion tells them; int16 numbers of experts come last, over all completions.

Format 1, without `format`, has no turns. In its first journals there are no `spans`: int32 versions lie between the two arrays,
one a token, and log-probs are float64. Both are read as well.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import defaultdict, deque
from dataclasses import replace
from itertools import accumulate, groupby, islice, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

import numpy as np

from offbeat_rollout import Completion, Finish, VersionSpan, version_spans
from offbeat_trainer.data.types import Limit, Score, Trajectory, Turn
from offbeat_trainer.errors import ResumeError
from offbeat_trainer.loops.events import (
    Dropped,
    Event,
    Finished,
    Flipped,
    Issued,
    PartialGroup,
    Restarted,
    Taken,
    newly_over,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from offbeat_trainer.data.types import Ending, Spans

FORMAT = 3
_READ = (0, 1, 2, FORMAT)  # 0 is a new file; 1 has no turns, and 1 and 2 keep a row of every group
WITH_TURNS = 2  # of completions: a file may hold all
WITH_EXPERTS = 3
WITH_ROWS = 4
BUSY_TIMEOUT_S = 10.0
LOG_PAGES = 1 << 15  # of 4 KiB
MAX_WAITING = 256
"""How many events may wait to be written; who has one more writes them."""
_TOGETHER_S = (
    0.005  # what comes in this time is one transaction: on its own an event takes five times as long
)

_TABLE = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,  -- index of a group, or a step
    version INTEGER,
    detail TEXT,
    body BLOB
)
"""
# Those that `forget` looks for: without it each of thousands of groups would be a walk over the whole run.
_GROUPS = "CREATE INDEX IF NOT EXISTS groups ON events (number) WHERE kind IN ('issued', 'half', 'finished')"
_OF_GROUP = "FROM events WHERE number = ? AND kind IN ('issued', 'half', 'finished')"
# And what it has not looked at yet.
_OPEN = "CREATE INDEX IF NOT EXISTS open ON events (seq) WHERE body IS NULL AND kind IN ('dropped', 'taken', 'restarted')"
_NOT_OVER = (
    "SELECT seq, kind, number, version, detail, body FROM events "
    "WHERE body IS NULL AND kind IN ('dropped', 'taken', 'restarted') ORDER BY seq"
)
_BEGUN_SINCE = "SELECT number FROM events WHERE kind = 'issued' AND version >= ?"
_EVENTS = (
    "SELECT kind, number, version, detail, CASE WHEN kind = 'taken' AND number < ? THEN NULL ELSE body END "
    "FROM events ORDER BY seq"
)
_INSERT = "INSERT INTO events (kind, number, version, detail, body) VALUES (?, ?, ?, ?, ?)"
# As json.dumps writes it; what is written here is no cycle, and to look for one costs as much as a third of the writing.
ENCODE = json.JSONEncoder(check_circular=False).encode
Row: TypeAlias = tuple[str, int, int | None, str | None, bytes | None]
"""Kind, index of a group or a step, version, what else there is as text, trajectories as bytes."""


class SqliteJournal:
    """Satisfies `Journal` with a file that a thread writes: the event loop does not wait for the disk.

    Events are written in order. A killed process may leave the last few out, none of which came before one that is there.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`, or make it.

        Raises:
            ResumeError: it is not a journal, or one of another format.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._open = True
        self._events: deque[Event] = deque()  # to be written, in this order
        self._has_events = threading.Event()
        self._lock = threading.Lock()  # of the connection
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        # isolation_level None: every statement is a transaction of its own, and no BEGIN is sent in between.
        self._db = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            # The log is moved into the database, and flushed, by `forget`; by itself only when it has grown large.
            self._db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in _READ:
                raise ResumeError(f"{path} has format {version}, this version reads {FORMAT}")
            self._db.execute(_TABLE)
            self._db.execute(_GROUPS)
            self._db.execute(_OPEN)
            self._db.execute("DROP INDEX IF EXISTS bodies")  # of formats before
            self._db.execute("DROP INDEX IF EXISTS over")
            self._db.execute(f"PRAGMA user_version={FORMAT}")
        except sqlite3.DatabaseError as error:
            self.close()
            at_work = "; a run is at work in it: wait until it has ended" if "locked" in str(error) else ""
            raise ResumeError(f"{path} cannot be used as a journal: {error}{at_work}") from error

    def write(self, event: Event) -> None:
        """See `Journal.write`; raises what an earlier event failed of."""
        if self._error is not None:
            raise self._error
        self._events.append(event)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_on, name="journal", daemon=True)
            self._thread.start()
        self._has_events.set()
        if len(self._events) > MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """See `Journal.flush`."""
        with self._lock:
            events = [self._events.popleft() for _ in range(len(self._events))]
            if not events:
                return
            try:
                with self._db:  # a commit, or a rollback
                    self._db.execute("BEGIN")
                    self._db.executemany(_INSERT, map(to_row, events))
            except BaseException:
                self._events.extendleft(reversed(events))
                raise

    def _write_on(self) -> None:
        while self._open:
            self._has_events.wait()
            time.sleep(_TOGETHER_S)
            self._has_events.clear()
            try:
                self.flush()
            except Exception as error:  # noqa: BLE001 - raised by the next `write`
                self._error = error
                return

    def events(self, start: int = 0) -> Iterator[Event]:
        """See `Journal.events`."""
        self.flush()
        for row in self._db.execute(_EVENTS, (start,)):
            kind, _, _, detail, body = row
            if kind == "dropped" and body is not None:
                yield from (Dropped(index=index, reason=detail) for index in json.loads(body))
            else:
                yield from_row(row)

    def forget(self, before_step: int) -> None:
        """See `Journal.forget`; then everything is flushed to disk. Nothing once it is closed: a run may end while a thread forgets."""
        self.flush()
        with self._lock:
            if self._open:
                with self._db:
                    self._db.execute("BEGIN")
                    self._forget(before_step)
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _forget(self, before_step: int) -> None:
        rows = [(row[0], from_row(row[1:])) for row in self._db.execute(_NOT_OVER)]
        over, void = newly_over(rows, before_step)
        for seq, step in over.items():
            groups = [self._forget_group(index) for index in step.indices]
            begun, spans = zip(*groups, strict=True) if groups else ((), ())
            body = to_row(replace(step, begun=begun, spans=spans))[-1]
            self._db.execute("UPDATE events SET body = ? WHERE seq = ?", (body, seq))
        dropped: defaultdict[str, list[int]] = defaultdict(list)
        late = {index for (index,) in self._db.execute(_BEGUN_SINCE, (before_step,))}
        for seq, event in rows:
            if isinstance(event, Dropped) and event.index in late:
                self._db.execute(f"DELETE {_OF_GROUP} AND kind != 'issued'", (event.index,))
            elif isinstance(event, Dropped):
                self._forget_group(event.index)
                dropped[event.reason].append(event.index)
                void.add(seq)
        self._db.executemany("DELETE FROM events WHERE seq = ?", [(seq,) for seq in void])
        merged = (("dropped", one[0], None, why, ENCODE(one).encode()) for why, one in dropped.items())
        self._db.executemany(_INSERT, merged)

    def _forget_group(self, index: int) -> tuple[int, Sequence[Spans]]:
        """Delete what is known of a group; return what a schedule needs, see `Taken`."""
        version, spans = 0, ()
        for kind, begun, detail in self._db.execute(
            f"SELECT kind, version, detail {_OF_GROUP} ORDER BY seq", (index,)
        ):
            if kind == "issued":
                version = begun
            elif kind == "finished":
                spans = json.loads(detail)["spans"]
        self._db.execute(f"DELETE {_OF_GROUP}", (index,))
        return version, spans

    def close(self) -> None:
        """See `Journal.close`."""
        if self._open:
            self._open = False
            try:
                if self._thread is not None:
                    self._has_events.set()
                    self._thread.join()
                if self._error is None:
                    self.flush()
            finally:
                with self._lock:  # SQLite crashes the process where another thread still uses what is closed
                    self._db.close()


def to_row(event: Event) -> Row:
    """Return `event` as a row."""
    match event:
        case Issued():
            return "issued", event.index, event.version, event.uid, None
        case PartialGroup():
            return "half", event.index, None, None, pack(event.trajectories)
        case Finished():
            detail = {"scores": _plain(event.scores), "spans": event.spans}
            if event.baseline:
                detail["baseline"] = _plain(event.baseline)
            return "finished", event.index, event.version, ENCODE(detail), pack(event.trajectories)
        case Taken():
            known = ENCODE({"begun": event.begun, "spans": event.spans}).encode() if event.begun else None
            return "taken", event.step, None, ENCODE(event.indices), known
        case Dropped():
            return "dropped", event.index, None, event.reason, None
        case Flipped():
            return "flipped", event.steps, event.version, None, None
        case Restarted():
            return "restarted", event.step, None, None, None
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
            return PartialGroup(index=number, trajectories=() if body is None else unpack(body))
        case "finished":
            return _finished(number, version or 0, json.loads(detail or "{}"), body)
        case "taken":
            return _taken(number, json.loads(detail or "[]"), json.loads(body or b"{}"))
        case "dropped":
            return Dropped(index=number, reason=str(detail))
        case "flipped":
            return Flipped(steps=number, version=version or 0)
        case "restarted":
            return Restarted(step=number)
        case _:
            raise ResumeError(
                f"the journal holds an event of kind {kind!r}, which this version does not know"
            )


def _finished(index: int, version: int, detail: dict[str, Any], body: bytes | None) -> Finished:
    return Finished(
        index=index,
        version=version,
        trajectories=() if body is None else unpack(body),
        scores=_scores(detail["scores"]),
        spans=_spans(detail["spans"]),
        baseline=_scores(detail.get("baseline", ())),
    )


def _plain(scores: Sequence[Score]) -> list[tuple[object, ...]]:
    return [(one.reward, one.correct, *([one.parts] if one.parts else [])) for one in scores]


def _scores(rows: Sequence[Any]) -> tuple[Score, ...]:
    return tuple(
        Score(reward=reward, correct=correct, parts=parts[0] if parts else {})
        for reward, correct, *parts in rows
    )


def _taken(step: int, indices: list[int], known: dict[str, Any]) -> Taken:
    return Taken(
        step=step,
        indices=tuple(indices),
        begun=tuple(known.get("begun", ())),
        spans=tuple(map(_spans, known.get("spans", ()))),
    )


def _spans(rows: Sequence[Sequence[Sequence[int]]]) -> tuple[Spans, ...]:
    return tuple(tuple((made_by, count) for made_by, count in one) for one in rows)


def pack(trajectories: Sequence[Trajectory]) -> bytes:
    """Return `trajectories` as bytes."""
    turns = [turn for one in trajectories for turn in one.turns]
    completions = [turn.completion for turn in turns]
    head: dict[str, object] = {
        "format": WITH_TURNS,
        "count": [one.num_tokens for one in completions],
        "request_id": [one.request_id for one in completions],
        "finish": [one.finish.value for one in completions],
        "spans": [one.spans for one in completions],
    }
    if any(one.stop_reason is not None for one in completions):
        head["stop_reason"] = [one.stop_reason for one in completions]
    if not all(one.is_plain for one in trajectories):
        head["turns"] = [[_entry(turn) for turn in one.turns] for one in trajectories]
        head["endings"] = [one.finish.value for one in trajectories]
    tokens = [np.asarray(one.token_ids, "<i4").tobytes() for one in completions]
    logprobs = [np.asarray(one.logprobs, "<f4").tobytes() for one in completions]
    observed = [np.asarray(turn.observed, "<i4").tobytes() for turn in turns]
    contexts = [np.asarray(turn.context, "<i4").tobytes() for turn in turns if turn.context is not None]
    routed = [one.routed_experts for one in completions]
    known = [experts for experts in routed if experts is not None]
    if known:
        fed = [0 if experts is None else len(experts) for experts in routed]
        head |= {"format": WITH_EXPERTS, "routed": known[0].shape[1:], "fed": fed}
    if contexts:
        head["format"] = WITH_ROWS
    experts = [np.asarray(one, "<i2").tobytes() for one in known]
    return b"".join((ENCODE(head).encode(), b"\n", *tokens, *logprobs, *observed, *contexts, *experts))


def _entry(turn: Turn) -> tuple[int, float] | tuple[int, float, int]:
    observed = len(turn.observed), turn.reward
    return observed if turn.context is None else (*observed, len(turn.context))


def unpack(body: bytes) -> tuple[Trajectory, ...]:
    """Return the trajectories in `body`.

    Raises:
        ResumeError: `body` was not made by `pack`, not whole, or written by a later version.
    """
    head, _, rest = body.partition(b"\n")
    try:
        fields = json.loads(head)
        if fields.get("format", 1) > WITH_ROWS:
            raise ResumeError(
                f"the journal was written by a later version (format {fields['format']}, this one reads {WITH_ROWS}); "
                "go on with that version, or start anew"
            )
        counts: list[int] = fields["count"]
        tokens, logprobs, spans = (_read if "spans" in fields else _read_unrolled)(fields, rest, counts)
        ends = pairwise(accumulate(counts, initial=0))
        reasons: list[int | str | None] = fields.get("stop_reason", [None] * len(counts))
        completions = [
            Completion(
                request_id=name,
                token_ids=tokens[a:b],
                logprobs=logprobs[a:b],
                spans=made_by,
                finish=Finish(finish),
                stop_reason=reason,
                routed_experts=experts,
            )
            for name, finish, made_by, reason, experts, (a, b) in zip(
                fields["request_id"],
                fields["finish"],
                spans,
                reasons,
                _experts(fields, rest),
                ends,
                strict=True,
            )
        ]
        if "turns" not in fields:
            return tuple(map(Trajectory.of, completions))
        return tuple(_in_turns(fields, completions, rest))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResumeError(
            f"the journal holds completions that cannot be read ({error}); without it the run can be started anew"
        ) from error


_Parts = tuple["npt.NDArray[np.int32]", "npt.NDArray[np.float32]", "list[tuple[VersionSpan, ...]]"]


def _read(fields: dict[str, Any], rest: bytes, counts: list[int]) -> _Parts:
    """Return token ids, log-probs and spans; the arrays are copies, so that `rest` need not stay."""
    total = sum(counts)
    _check_size(rest, total, 8, 4 * _num_observed(fields) + 2 * _num_routed(fields))
    tokens = np.frombuffer(rest, "<i4", total).astype(np.int32)
    logprobs = np.frombuffer(rest, "<f4", total, offset=4 * total).astype(np.float32)
    return tokens, logprobs, [tuple(VersionSpan(*span) for span in one) for one in fields["spans"]]


def _read_unrolled(fields: dict[str, Any], rest: bytes, counts: list[int]) -> _Parts:
    del fields
    total = sum(counts)
    _check_size(rest, total, 16)
    tokens = np.frombuffer(rest, "<i4", total).astype(np.int32)
    versions: list[int] = np.frombuffer(rest, "<i4", total, offset=4 * total).tolist()
    logprobs = np.frombuffer(rest, "<f8", total, offset=8 * total).astype(np.float32)
    spans = [
        version_spans((version, len(list(run))) for version, run in groupby(versions[a:b]))
        for a, b in pairwise(accumulate(counts, initial=0))
    ]
    return tokens, logprobs, spans


def _in_turns(fields: dict[str, Any], completions: Sequence[Completion], rest: bytes) -> Iterator[Trajectory]:
    """Yield the trajectories that `completions` are the turns of."""
    read = np.frombuffer(rest, "<i4", _num_observed(fields), offset=8 * sum(fields["count"])).astype(np.int32)
    read.setflags(write=False)
    left, begin = iter(completions), 0
    at = sum(entry[0] for one in fields["turns"] for entry in one)  # where contexts begin
    for entries, ending in zip(fields["turns"], fields["endings"], strict=True):
        turns: list[Turn] = []
        for (count, reward, *own), completion in zip(entries, islice(left, len(entries)), strict=True):
            context = read[at : at + own[0]] if own else None
            observed = read[begin : begin + count]
            turns.append(Turn(completion=completion, observed=observed, reward=reward, context=context))
            begin, at = begin + count, at + sum(own)
        yield Trajectory(turns=tuple(turns), finish=_ending(ending))
    if next(left, None) is not None:
        raise ValueError("completions that are no turn of a trajectory")


def _ending(name: str) -> Ending:
    return Limit(name) if name in set(Limit) else Finish(name)


def _experts(fields: dict[str, Any], rest: bytes) -> Iterator[npt.NDArray[np.int16] | None]:
    """Yield the experts of each completion; None where it tells none."""
    fed: list[int] = fields.get("fed", [0] * len(fields["count"]))
    count = _num_routed(fields)
    routed = np.frombuffer(rest, "<i2", count, offset=len(rest) - 2 * count).astype(np.int16)
    each = routed.reshape(sum(fed), *fields.get("routed", (0, 0)))
    for a, b in pairwise(accumulate(fed, initial=0)):
        yield each[a:b] if b > a else None


def _num_routed(fields: dict[str, Any]) -> int:
    layers, top_k = fields.get("routed", (0, 0))
    return sum(fields.get("fed", ())) * layers * top_k


def _num_observed(fields: dict[str, Any]) -> int:
    """Return how many tokens were observed, those of contexts included."""
    return sum(count + sum(own) for one in fields.get("turns", ()) for count, _, *own in one)


def _check_size(rest: bytes, total: int, token_bytes: int, num_others: int = 0) -> None:
    if len(rest) != total * token_bytes + num_others:
        raise ValueError(
            f"{len(rest)} bytes of arrays for {total} tokens, and {num_others} of what stands beside them"
        )
