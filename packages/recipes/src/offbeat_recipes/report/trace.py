"""The trace of a run, made fit to draw: tracks of trainer, replicas, generation, buffer and sync."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_EVENTS = 80_000
"""Of a longer trace the end is drawn."""


@dataclass(slots=True)
class _Track:
    spans: list[tuple[float, float, str, str]] = field(default_factory=list[tuple[float, float, str, str]])
    marks: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    curve: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    level: float = 0.0
    under_way: dict[str, float] = field(default_factory=dict[str, float])


def read_trace(path: Path) -> dict[str, Any] | None:
    """Return the trace at `path` as tracks, in milliseconds since its first event.

    None where nothing is there to draw.

    A track has `spans` (start, duration, name, detail), `marks` (time, name) and a `curve` (time, value): how
    many groups or requests are under way, or a counter. `cut` says that only the end of the trace is in it.
    Torn lines are passed over.
    """
    names: dict[object, str] = {}
    newest: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
    count = 0
    for event in _objects(path):
        if event.get("name") == "thread_name":
            names[event.get("tid")] = str(_arguments(event).get("name", ""))
        elif isinstance(event.get("ts"), int | float):
            newest.append(event)
            count += 1
    if not newest:
        return None
    events = sorted(newest, key=lambda event: float(event["ts"]))
    begin = float(events[0]["ts"])
    tracks: dict[str, _Track] = {}
    end = begin
    for event in events:
        at = float(event["ts"])
        end = max(end, at + _number(event.get("dur")))
        track = tracks.setdefault(str(names.get(event.get("tid"), "other")), _Track())
        _take(track, event, (at - begin) / 1e3)
    return {
        "ms": round((end - begin) / 1e3, 1),
        "cut": count > MAX_EVENTS,
        "tracks": [
            {"name": name, "spans": track.spans, "marks": track.marks, "curve": track.curve}
            for name, track in sorted(tracks.items(), key=lambda item: _rank(item[0]))
        ],
    }


def _take(track: _Track, event: dict[str, Any], at: float) -> None:
    args = _arguments(event)
    at = round(at, 1)
    match event.get("ph"):
        case "X":
            words = [f"{key} {value}" for key, value in args.items() if value and key != "detail"]
            detail = ", ".join([str(args["detail"])] if args.get("detail") else words)
            track.spans.append(
                (at, round(_number(event.get("dur")) / 1e3, 2), str(event.get("name")), detail)
            )
        case "i":
            track.marks.append((at, str(event.get("name"))))
        case "C":
            track.curve.append((at, _number(args.get("value"))))
        case "b":
            track.under_way[str(event.get("id"))] = _number(args.get("requests", 1))
            track.level += track.under_way[str(event.get("id"))]
            track.curve.append((at, track.level))
        case "e":  # of a begin that was cut off nothing is known
            track.level -= track.under_way.pop(str(event.get("id")), 0.0)
            track.curve.append((at, track.level))
        case _:
            pass


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    """Return what an event says beside its name."""
    args: object = event.get("args")
    return cast("dict[str, Any]", args) if isinstance(args, dict) else {}


def _rank(name: str) -> tuple[int, str]:
    order = {"trainer": 0, "generation": 2, "ready groups": 3, "sync": 4}
    return order.get(name, 1 if name.startswith("replica") else 5), name


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file of one event a line, as `Timeline` writes it."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    value = json.loads(line.strip().rstrip(","))
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield cast("dict[str, Any]", value)
    except OSError:
        return
