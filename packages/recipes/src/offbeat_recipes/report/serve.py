"""The report of a run that goes on, over HTTP on this machine: the page asks for what is new."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from offbeat_recipes.report.build import page, report_data

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _version: str = ""
    _data: tuple[dict[str, Any], dict[str, str]] = field(default_factory=lambda: ({}, {}))

    def data(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return what the page shows, with its `version`, and its blocks; see `report_data`."""
        with self._lock:
            found = self._files()
            if found != self._version:
                main, blocks = report_data(self.folders)
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


def server(folders: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the report at `/`, bound to this machine alone; 0 takes a free port.

    `serve_forever` runs it.

    It answers to no other name than this machine's: a page of somebody else's that leads a name of its own
    here reads nothing.

    Raises:
        RunFolderError: one of `folders` is no run folder.
        OSError: the port is taken.
    """
    live = Live(folders)
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
