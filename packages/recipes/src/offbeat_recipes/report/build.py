"""From run folders to one page: what is compared, what is embedded, and the file itself.

The page holds its script, its style and all data, and asks no network for anything. Its data are JSON in
which every `<` is escaped, and blocks of compressed JSON in base64; a content security policy lets no script
run but the page's own.

The report of a run that goes on, over HTTP on this machine: the page asks for what is new.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import threading
import time
import zlib
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from offbeat_recipes.report.advice import advice
from offbeat_recipes.report.collect import STEP_PHASES, collect, told_settings
from offbeat_recipes.report.metrics import CHARTS, Known, label_of, lookup, out_of_range
from offbeat_recipes.report.tokens import take_tokens
from offbeat_recipes.settings.reading import flatten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from offbeat_recipes.report.collect import Run


REPORT = "report.html"
ROWS_PER_BLOCK = 4000
# Settings that change nothing of what is trained.
_BESIDE = ("seed", *(f"trainer.{name}" for name in ("validat", "save_every", "keep_", "sample_every")))
_SCRIPTS = ("page.js", "charts.js", "timeline.js", "tokens.js", "rollouts.js", "main.js")


def write_report(folders: Sequence[Path], output: Path | None = None, *, price: float = 0.0) -> Path:
    """Write the report of the runs in `folders` to `output`, or `report.html` in the first; return where.

    `price` is that of a device hour, for what steps cost.

    Raises:
        RunFolderError: one of them is no run folder.
        OSError: the file cannot be written; an earlier one is left as it was.
    """
    path = folders[0] / REPORT if output is None else output
    beside = path.with_name(path.name + ".writing")
    try:
        beside.write_text(page(*report_data(folders, price)), encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return path


def report_data(folders: Sequence[Path], price: float = 0.0) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the page shows at once, and by name the blocks that it loads in pieces.

    Raises:
        RunFolderError: one of `folders` is no run folder.
    """
    runs = [collect(folder, price) for folder in folders]
    groups = _groups(runs)
    blocks: dict[str, str] = {}
    shown: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        of_tokens = take_tokens(run.rows)
        for number, tokens in enumerate(of_tokens):
            blocks[f"tokens-{index}-{number}"] = _packed(tokens)
        pieces = [run.rows[at : at + ROWS_PER_BLOCK] for at in range(0, len(run.rows), ROWS_PER_BLOCK)]
        for number, rows in enumerate(pieces):
            blocks[f"rows-{index}-{number}"] = _packed({key: [row[key] for row in rows] for key in rows[0]})
        if run.timeline is not None:
            blocks[f"timeline-{index}"] = _packed(run.timeline)
        values = asdict(run) | {
            "rows": len(run.rows),
            "blocks": len(pieces),
            "has_tokens": bool(of_tokens),
            "timeline": run.timeline is not None,
            "advice": [asdict(one) for one in advice(run)],
        }
        del values["config"]
        shown.append(values | {"flags": list(_flags(run)), "choices": _choices(run), "phases": STEP_PHASES})
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return {"title": title, "made": made, "runs": shown, "groups": groups, "charts": _charts(runs)}, blocks


def page(main: dict[str, Any], blocks: dict[str, str], *, live: bool = False) -> str:
    """Return the page as HTML; a `live` one asks where it came from for what is new."""
    folder = files("offbeat_recipes") / "report" / "page"
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    connect = "; connect-src 'self'" if live else ""
    own = f"script-src {_digest(script)}; style-src {_digest(style)}"
    policy = f"default-src 'none'; img-src data:; {own}{connect}"
    parts = {
        "policy": html.escape(policy),
        "title": html.escape(main["title"]),
        "style": style,
        "main": embedded(main | {"live": live}),
        "script": script,
        "blocks": "\n".join(
            f'<script type="text/plain" data-block="{name}">{text}</script>' for name, text in blocks.items()
        ),
    }
    pieces = re.split(r"<!--(\w+)-->", (folder / "page.html").read_text(encoding="utf-8"))
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def embedded(value: object) -> str:
    """Return `value` as JSON for a script element: no text in it can end that, or begin a comment."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(value: object) -> str:
    """Return `value` as JSON, compressed as zlib does, in base64."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("utf-8", "backslashreplace"), 6)).decode("ascii")


def _charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the charts that these runs fill, in the order of the table.

    Metrics that it does not know come last, as the code of the runs describes them.
    """
    keys = sorted({key for run in runs for key in run.series})
    found: list[dict[str, Any]] = []
    for chart in CHARTS:
        entries = [
            {"key": key, "label": label_of(key, fit[1]), "unit": fit[1].unit, "meaning": fit[1].meaning}
            for known in chart.metrics
            for key in keys
            if (fit := lookup(key)) is not None and fit == (chart, known) and known.drawn
        ]
        if entries:
            head = {"title": chart.title, "section": chart.section, "kind": chart.kind}
            found.append({**head, "usual": chart.usual, "advice": chart.advice, "metrics": entries})
    described = {key: known for run in runs for key, known in run.described.items()}
    for key in (key for key in keys if lookup(key) is None):
        known = described.get(key, Known(key=key, unit="", meaning=""))
        entry = {"key": key, "label": key, "unit": known.unit, "meaning": known.meaning}
        head = {"title": key, "section": "health", "kind": "lines", "usual": "Of the run's own algorithm."}
        found.append({**head, "advice": "", "metrics": [entry]})
    return found


def _flags(run: Run) -> Iterator[dict[str, object]]:
    """Yield which metrics are not as usual at the end of the run.

    Older tokens differ in log-probs by what was learned since.
    """
    ages = run.series.get("staleness/max", [None] * len(run.steps))
    for key, values in run.series.items():
        chart, known = lookup(key) or (None, run.described.get(key))
        fresh = [value for value, age in zip(values, ages, strict=True) if not age]
        seen = fresh if key.startswith("mismatch/") else values
        value = None if known is None else out_of_range(known, seen)
        if known is not None and value is not None:
            yield {
                "key": key,
                "value": value,
                "title": key if chart is None else chart.title,
                "unit": known.unit,
                "low": known.low,
                "high": known.high,
            }


def _groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return together runs that train the same but for their seed, each group with what tells it apart."""
    differing = [
        {key: value for key, value in told_settings(run).items() if not key.startswith(_BESIDE)}
        for run in runs
    ]
    alike: dict[str, list[int]] = {}
    for index, settings in enumerate(differing):
        own = json.dumps(settings, sort_keys=True, default=str) if settings else f"run {index}"
        alike.setdefault(own, []).append(index)
    labels = _labels([(runs[members[0]].name, differing[members[0]]) for members in alike.values()])
    return [
        {"label": f"{label} ({len(members)} seeds)" if len(members) > 1 else label, "runs": members}
        for label, members in zip(labels, alike.values(), strict=True)
    ]


def _labels(named: Sequence[tuple[str, dict[str, object]]]) -> list[str]:
    """Return for each (name, settings) what tells it apart: the fewest settings, choices before numbers."""
    keys = {key for _, settings in named for key in settings}
    differing = [key for key in keys if len({str(settings.get(key, "")) for _, settings in named}) > 1]
    in_all = {key: all(key in settings for _, settings in named) for key in differing}
    words: list[list[str]] = [[] for _ in named]
    for key in sorted(differing, key=lambda key: (not key.endswith(".name"), not in_all[key], key)):
        if len({tuple(one) for one in words}) == len(named):
            break
        short = key.removesuffix(".name").rpartition(".")[2]
        for one, (_, settings) in zip(words, named, strict=True):
            one += [f"{short}={settings[key]}"] if key in settings else []
    return [", ".join(one) or name for one, (name, _) in zip(words, named, strict=True)]


def _choices(run: Run) -> list[tuple[str, str]]:
    """Return what kind of run it is, in the words of its settings."""
    flat = flatten(run.config)
    named = ("task", "algorithm", "mode", "engine", "rollout")
    chosen = [(name, str(flat[f"{name}.name"])) for name in named if f"{name}.name" in flat]
    rest = ("model.path", "device", "seed")
    return chosen + [
        (name.partition(".")[0], str(flat[name])) for name in rest if flat.get(name) not in (None, "")
    ]


_READ = (
    "config.yaml",
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
    "machine.json",
    "trace.json",
    ".lock",
)
_LOCAL = ("127.0.0.1", "localhost")


@dataclass(slots=True)
class Live:
    """The newest data of the runs in `folders`, read again where a file of theirs has changed."""

    folders: Sequence[Path]
    price: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _version: str = ""
    _data: tuple[dict[str, Any], dict[str, str]] = field(default_factory=lambda: ({}, {}))

    def data(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return what the page shows, with its `version`, and its blocks; see `report_data`."""
        with self._lock:
            found = self._files()
            if found != self._version:
                main, blocks = report_data(self.folders, self.price)
                self._version, self._data = found, (main | {"version": found}, blocks)
            return self._data

    def _files(self) -> str:
        """Return what changes when a file does. It goes into an address: digits and points alone."""
        stamps: list[str] = []
        for path in (folder / name for folder in self.folders for name in _READ):
            try:
                stat = path.stat()
                stamps.append(f"{stat.st_mtime_ns}.{stat.st_size}")
            except OSError:
                stamps.append("0")
        return "-".join(stamps)


def server(folders: Sequence[Path], port: int = 0, *, price: float = 0.0) -> ThreadingHTTPServer:
    """Return a server of the report at `/`, bound to this machine alone; 0 takes a free port.

    `serve_forever` runs it.

    It answers to no other name than this machine's: a page of somebody else's that leads a name of its own
    here reads nothing.

    Raises:
        RunFolderError: one of `folders` is no run folder.
        OSError: the port is taken.
    """
    live = Live(folders, price)
    live.data()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if (self.headers.get("Host") or "").partition(":")[0] not in _LOCAL:
                self.send_error(403, "this report answers to 127.0.0.1 and localhost alone")
            elif url.path == "/":
                self._answer("text/html; charset=utf-8", page(*live.data(), live=True))
            elif url.path == "/data.json":
                main, blocks = live.data()
                is_new = parse_qs(url.query).get("have") != [main["version"]]
                answer = {"main": main, "blocks": blocks} if is_new else {}
                self._answer("application/json", json.dumps(answer))
            else:
                self.send_error(404)

        def _answer(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: requests of one's own browser are no news."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
