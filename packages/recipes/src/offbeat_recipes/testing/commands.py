"""A command of the house as a process that a test may kill."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import signal
    from pathlib import Path

Name = Literal["train", "sft", "evaluate", "plan"]
POLL_S = 0.02


class Command:
    """`offbeat-<name> <words>` in a process and session of its own, forked off one that has loaded the libraries.

    A fresh interpreter takes five seconds to import them, a fork milliseconds; apart from that it is the same call of
    the same `main`. What it says is kept in two files beside `log`.

    Raises:
        AssertionError: from the methods that wait, with what the command said, when it ended otherwise than expected
            or not in time.
    """

    def __init__(self, name: Name, words: list[str], log: Path) -> None:
        """Start it; `log` is a path without suffix, to which `.out` and `.err` are added."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["offbeat_recipes.testing.preload"])
        self._process = context.Process(target=_serve, args=(name, words, str(self._out), str(self._err)))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def said(self) -> str:
        """What it wrote to stdout so far."""
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    @property
    def complained(self) -> str:
        """What it wrote to stderr so far."""
        return self._err.read_text(errors="replace") if self._err.exists() else ""

    def poll(self) -> int | None:
        """Return the exit code, minus the signal where one ended it, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Return the exit code once it has ended."""
        self._process.join(timeout_s)
        code = self.poll()
        assert code is not None, f"not over within {timeout_s:g} s\n{self.said}{self.complained}"
        return code

    def succeed(self, timeout_s: float) -> str:
        """Wait for a good end and return what was said."""
        code = self.wait(timeout_s)
        assert code == 0, f"exit code {code}\n{self.said}{self.complained}"
        return self.said

    def wait_for_steps(self, metrics: Path, num_steps: int, timeout_s: float) -> None:
        """Wait until the file `metrics` holds `num_steps` lines."""
        deadline = time.monotonic() + timeout_s
        while not metrics.exists() or metrics.read_text().count("\n") < num_steps:
            assert self.poll() is None, f"over before step {num_steps}\n{self.said}{self.complained}"
            assert time.monotonic() < deadline, f"no step {num_steps} within {timeout_s:g} s\n{self.said}"
            time.sleep(POLL_S)

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send it a signal; with `group` to all of its session's first group, as a terminal does for Ctrl-C."""
        (os.killpg if group else os.kill)(self.pid, number)


def _serve(name: Name, words: list[str], out: str, err: str) -> None:
    os.setsid()
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = [f"offbeat-{name}", *words]
    commands = import_module("offbeat_recipes.cli.train")
    sys.exit(getattr(commands, "main" if name == "train" else name)(words))
