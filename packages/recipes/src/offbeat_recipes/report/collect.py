"""What a run folder holds, as plain values: of a run that ended, is at work, was killed, is of another version.

Everything is optional but that it is a run folder; what is not there is said in `Run.notes`.

The trace of a run, made fit to draw: tracks of trainer, replicas, generation, buffer and sync.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import deque
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import yaml

from offbeat_recipes.errors import RunFolderError, SettingError
from offbeat_recipes.report.metrics import Known
from offbeat_recipes.report.tokens import MAX_TOKENS, TOKENS_PER_STEP, mappings, num_tokens, tokens_of
from offbeat_recipes.settings.reading import flatten, parse, to_dict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
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


MAX_ROWS = 100_000
"""Of more trajectories the newest are read."""
SAMPLED = "sampled"  # the title of samples that are of what a step trained
STEP_PHASES = ("generate", "reward", "train", "sync")
HELD_OUT_PHASES = ("validate", "evaluate")
_OWN = ("run_dir", "name", "resume", "report.")  # settings that tell nothing of what a run does
_SECTIONS = ("mode", "engine", "rollout", "algorithm")
_ROW = {"step": 0, "title": "", "uid": "", "prompt": "", "completion": "", "num_tokens": 0, "finish": ""}
_WENT_BY = re.compile(r" version (\d+) went by (.*)")


@dataclass(slots=True, kw_only=True)
class Run:
    """One run. `series` has a value, or None, of each metric for each of `steps`; `described` says what those of its own code are.

    `state` is "done", "stopped", "failed", "running" or "ended early". `settings` are (path, value, default)
    where those differ; `defaults_known` says whether they could be compared. `rows` are completions, newest
    last. `timeline` is that of `read_trace`.
    """

    name: str
    state: str = "ended early"
    notes: list[str] = field(default_factory=list[str])
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    steps: list[int] = field(default_factory=list[int])
    series: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    described: dict[str, Known] = field(default_factory=dict[str, Known])
    config: dict[str, object] = field(default_factory=dict[str, object])
    settings: list[tuple[str, object, object]] = field(default_factory=list[tuple[str, object, object]])
    defaults_known: bool = True
    machine: dict[str, Any] = field(default_factory=dict[str, Any])
    went_by: list[str] = field(default_factory=list[str])
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    timeline: dict[str, Any] | None = None


def collect(path: Path, price: float = 0.0) -> Run:
    """Return what the run folder at `path` holds. Nothing in it is changed, and no lock is taken.

    `price` is that of a device hour, in any currency; 0: not known.

    Raises:
        RunFolderError: it is no run folder.
    """
    run = collect_figures(path, price)
    lost: object = run.summary.get("lost_replicas")
    reasons = cast("list[object]", lost) if isinstance(lost, list) else []
    run.notes += [f"a replica was lost: {reason}" for reason in reasons[-3:]]
    run.machine = _read_json(run, path / "machine.json", "versions and hardware are not known")
    run.state = _state(run, path)
    if run.state == "running":  # it comes with the end
        run.notes = [note for note in run.notes if not note.startswith("summary.json is missing")]
    _read_rows(run, path)
    run.timeline = read_trace(path / "trace.json")
    if run.timeline is None:
        run.notes.append("trace.json is missing or empty: no timeline")
    run.went_by = _transports(path / "logs" / "driver.log")
    return run


def collect_figures(path: Path, price: float = 0.0) -> Run:
    """Return of what `collect` does settings, metrics and the figures of the end alone, which are read at once."""
    known = [name for name in ("config.yaml", "metrics.jsonl", "summary.json") if (path / name).is_file()]
    if "config.yaml" not in known and len(known) < 2:
        raise RunFolderError(
            f"{path} is no run folder: it has no config.yaml, which every run writes first; give runs/<name>"
        )
    run = Run(name=path.resolve().name)
    _read_settings(run, path)
    _read_metrics(run, path / "metrics.jsonl", price)
    _read_described(run, path / "metrics_described.json")
    run.summary = _read_json(run, path / "summary.json", "the figures of the end are missing")
    return run


def told_settings(run: Run) -> dict[str, object]:
    """Return the settings of `run` by path, without those of where it lies and what it is called."""
    return {key: value for key, value in flatten(run.config).items() if not key.startswith(_OWN)}


def _read_settings(run: Run, path: Path) -> None:
    try:
        settings: object = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        settings = None
        run.notes.append(f"config.yaml cannot be read ({type(error).__name__}): the settings are not known")
    if not isinstance(settings, dict):
        return
    run.config = cast("dict[str, object]", settings)
    defaults = _defaults(run.config)
    run.defaults_known = defaults is not None
    if defaults is None:
        run.notes.append("its settings are of another version of Offbeat: all are listed")
    before = {} if defaults is None else defaults
    run.settings = [
        (key, value, before.get(key))
        for key, value in told_settings(run).items()
        if key not in before or before[key] != value
    ]


def _defaults(config: Mapping[str, object]) -> dict[str, object] | None:
    """Return the settings by path that a run of this task, mode, engine and algorithm has by itself.

    None: of another version.
    """
    names = {name: _name_in(config.get(name)) for name in (*_SECTIONS, "task")}
    raw: dict[str, Any] = {}
    recipe = files("offbeat_recipes") / "settings" / "conf" / "task" / f"{names['task']}.yaml"
    if recipe.is_file():
        raw = cast("dict[str, Any]", yaml.safe_load(recipe.read_text(encoding="utf-8")))
    for section, name in names.items():
        raw[section] = {**raw.get(section, {}), **({"name": name} if name else {})}
    try:
        return flatten(json.loads(json.dumps(to_dict(parse(raw)))))
    except SettingError:
        return None


def _name_in(section: object) -> str:
    return str(cast("dict[str, object]", section).get("name", "")) if isinstance(section, dict) else ""


def _read_metrics(run: Run, path: Path, price: float) -> None:
    """Fill in steps and series; of a step that is there twice the later line counts."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in _lines(run, path):
        if isinstance(line.get("step"), int):
            by_step[line["step"]] = line
    run.steps = sorted(by_step)
    lines = [by_step[step] for step in run.steps]
    for key in sorted({key for line in lines for key in line} - {"step", "time_s"}):
        run.series[key] = [_finite(line.get(key)) for line in lines]
    if not lines:
        run.notes.append("metrics.jsonl holds no finished step")
    elif "tokens/generated" in run.series:
        run.series["tokens/generated_per_s"] = [_speed(line) for line in lines]
    hours = [
        _seconds(line, *STEP_PHASES, *HELD_OUT_PHASES) / 3600 * _num_devices(run.config) for line in lines
    ]
    if any(hours):
        run.series["cost/device_hours"] = [_finite(value) for value in accumulate(hours)]
        if price:
            run.series["cost/money"] = [_finite(price * value) for value in accumulate(hours)]
            run.series["cost/money_per_step"] = [_finite(price * value) for value in hours]


def _read_described(run: Run, path: Path) -> None:
    if not path.is_file():  # there were none, or the run is of an earlier version
        return
    for key, values in _read_json(run, path, "its own metrics have no units").items():
        run.described[key] = Known(
            key=key,
            unit=str(values.get("unit", "")),
            meaning=str(values.get("meaning", "")),
            low=_finite(values.get("low")),
            high=_finite(values.get("high")),
        )


def _num_devices(config: Mapping[str, object]) -> int:
    """Return how many devices a run holds: the GPUs of ranks and replicas; on CPU the machine is one."""
    flat = flatten(config)
    ranks, replicas, width = (
        number if isinstance(number := flat.get(name), int) else 1
        for name in ("engine.num_ranks", "rollout.num_replicas", "rollout.tensor_parallel_size")
    )
    if flat.get("device") != "cuda":
        return 1
    return ranks if flat.get("cluster.placement") == "colocated" else ranks + replicas * width


def _finite(value: object) -> float | None:
    """Return a number of at most six digits, as JSON has it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _seconds(line: Mapping[str, Any], *phases: str) -> float:
    return sum(_finite(line.get(f"time/{name}_s")) or 0.0 for name in phases)


def _speed(line: Mapping[str, Any]) -> float | None:
    seconds = _seconds(line, *STEP_PHASES)
    tokens = _finite(line.get("tokens/generated"))
    return _finite(tokens / seconds) if tokens is not None and seconds else None


def _read_json(run: Run, path: Path, without: str) -> dict[str, Any]:
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return cast("dict[str, Any]", content)
        run.notes.append(f"{path.name} holds no mapping: {without}")
    except FileNotFoundError:
        run.notes.append(f"{path.name} is missing: {without}")
    except (OSError, ValueError) as error:
        run.notes.append(f"{path.name} cannot be read ({type(error).__name__}): {without}")
    return {}


def _lines(run: Run, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one a line; torn and foreign lines are counted in a note."""
    num_bad = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                try:
                    value: object = json.loads(line)
                except ValueError:
                    value = None
                if isinstance(value, dict):
                    yield cast("dict[str, Any]", value)
                else:
                    num_bad += bool(line.strip())
    except FileNotFoundError:
        run.notes.append(f"{path.name} is missing")
    except (OSError, EOFError, zlib.error):  # a compressed file that was cut off
        num_bad += 1
    if num_bad:
        run.notes.append(f"{path.name}: {num_bad} line(s) are torn or no JSON, and left out")


def _read_rows(run: Run, path: Path) -> None:
    """Fill in completions: of samples.jsonl, and of steps whose trajectories were kept all of these."""
    files = sorted((path / "trajectories").glob("step_*.jsonl.gz"), key=lambda file: int(_digits(file.name)))
    trajectories: list[list[dict[str, Any]]] = []
    count, left = 0, MAX_TOKENS
    for file in reversed(files):
        share = min(left, max(TOKENS_PER_STEP, MAX_TOKENS // len(files)))
        rows = list(_trained_rows(_lines(run, file), share))
        left -= sum(num_tokens(row["tokens"]) for row in rows)
        count += len(rows)
        if count > MAX_ROWS:
            run.notes.append(
                f"of {len(files)} steps in trajectories, the newest {len(trajectories)} are shown"
            )
            break
        trajectories.insert(0, rows)
    whole = {row["step"] for rows in trajectories for row in rows}
    samples = [row for row in map(_row, _lines(run, path / "samples.jsonl")) if row is not None]
    samples = [row for row in samples if row["title"] != SAMPLED or row["step"] not in whole]
    run.rows = sorted(
        [*samples, *(row for rows in trajectories for row in rows)], key=lambda row: row["step"]
    )
    if not run.rows:
        run.notes.append("no completions were kept: see trainer.sample_every and report.trackers")


def _trained_rows(lines: Iterable[dict[str, Any]], share: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a step, with tokens until there are `share` of them."""
    for line in lines:
        row = _row(line)
        if row is not None:
            row["tokens"] = tokens_of(line.get("turns")) if share > 0 else None
            share -= num_tokens(row["tokens"])
            yield row


def _digits(text: str) -> str:
    return "".join(filter(str.isdigit, text)) or "0"


def _row(line: dict[str, Any]) -> dict[str, Any] | None:
    if not isinstance(line.get("completion"), str):
        return None
    row = {key: line[key] if type(line.get(key)) is type(empty) else empty for key, empty in _ROW.items()}
    correct = line.get("correct")
    return {
        **row,
        "reward": _finite(line.get("reward")),
        "correct": correct if isinstance(correct, bool) else None,
        "turns": _turns(line.get("turns")),
        "parts": parts if isinstance(parts := line.get("parts"), dict) and parts else None,
        "tokens": None,
    }


def _turns(value: object) -> list[dict[str, Any]] | None:
    """Return the turns of a trajectory of several, of tokens and log-probs their number; None of one."""
    turns = mappings(value)
    if len(turns) < 2 and not any("observed" in turn for turn in turns):
        return None
    return [
        {
            key: turn[key]
            for key in ("role", "text", "reward", "versions", "observed", "sampled")
            if key in turn
        }
        | (
            {"num_tokens": len(cast("list[object]", ids))}
            if isinstance(ids := turn.get("token_ids"), list)
            else {}
        )
        for turn in turns
    ]


def _state(run: Run, path: Path) -> str:
    if _is_locked(path / ".lock"):
        return "running"
    if not run.summary:
        return "ended early"
    if run.summary.get("error"):
        return "failed"
    return "stopped" if run.summary.get("interrupted") else "done"


def _is_locked(lock: Path) -> bool:
    """Return whether another process of this machine holds `lock`.

    Taking it to see would stop a run that starts just now.
    """
    try:
        inode, table = lock.stat().st_ino, lock.parent.joinpath("/proc/locks").read_text(encoding="ascii")
        own = lock.parent.joinpath("/proc/self").resolve().name
    except OSError:
        return False
    locks = [words for line in table.splitlines() if len(words := line.split()) > 5 and words[1] == "FLOCK"]
    return any(words[5].endswith(f":{inode}") and words[4] != own for words in locks)


def _transports(log: Path) -> list[str]:
    """Return by which transport weights went, from which version on, and why."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            found = [match for line in file if (match := _WENT_BY.search(line))]
    except OSError:
        return []
    return [f"from version {match[1]} by {match[2]}" for match in found]
