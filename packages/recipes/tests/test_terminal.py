"""A run at a terminal, typed into a shell there: the window is closed, or Ctrl-Z and `fg`; the run goes on."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.ray, pytest.mark.deep, pytest.mark.spawns]

RUN_TIMEOUT_S = 600.0
LIMIT_S = 60.0  # every deadline that a stop could run out; AWAY_S is longer
AWAY_S = 75.0
STEPS = 12
WORDS = (
    "task=arithmetic", "rollout=hf", "mode=fully_async", "engine.num_ranks=2", "warmup.steps=4", f"trainer.steps={STEPS}",
    "trainer.prompts_per_step=4", "trainer.group_size=4", "trainer.save_every=2", "trainer.validate_every=4",
    "trainer.validation_prompts=8", f"trainer.step_timeout_s={LIMIT_S}",
    f"cluster.health_timeout_s={LIMIT_S}",
)  # fmt: skip


class Terminal:
    """An interactive shell at a terminal of its own, as a window has it."""

    def __init__(self) -> None:
        self.keys, screen = pty.openpty()
        self._said = bytearray()
        self.shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(screen)
        self._reader = threading.Thread(target=self._read, name="screen", daemon=True)
        self._reader.start()

    def press(self, text: str) -> None:
        os.write(self.keys, text.encode())

    @property
    def said(self) -> str:
        return self._said.decode(errors="replace")

    def close(self) -> None:
        """Close the window: nobody holds the terminal's other side any more."""
        if self.keys >= 0:
            keys, self.keys = self.keys, -1
            os.close(keys)

    def _read(self) -> None:
        while self.keys >= 0:
            try:
                self._said += os.read(self.keys, 4096)
            except OSError:
                return


@contextmanager
def typed(folder: Path) -> Iterator[tuple[Terminal, int]]:
    """Type a run into a terminal and wait for its first steps; yields the terminal and the driver's process."""
    terminal = Terminal()
    program = Path(sys.executable).parent / "offbeat-train"
    terminal.press(shlex.join([str(program), *WORDS, f"run_dir={folder}"]) + "\n")
    driver = 0
    try:
        until(lambda: steps(folder) >= 2, terminal, "no step came")
        driver = the_driver(folder)
        yield terminal, driver
    finally:
        terminal.close()
        if driver and not over(driver):
            os.kill(driver, signal.SIGKILL)
        terminal.shell.kill()
        terminal.shell.wait(RUN_TIMEOUT_S)


def until(met: Callable[[], bool], terminal: Terminal, otherwise: str) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not met():
        assert time.monotonic() < deadline, f"{otherwise} within {RUN_TIMEOUT_S:g} s\n{terminal.said}"
        time.sleep(0.05)


def steps(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def the_driver(folder: Path) -> int:
    """Return the process that writes the run's metrics."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        if str(folder / "metrics.jsonl") in files:
            return int(pid)
    raise AssertionError("nobody writes metrics")


def over(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or state(pid) == "Z"


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def check_whole(folder: Path) -> None:
    """Hold that all steps were done, by one process, and nobody was lost on the way."""
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["interrupted"]) == (STEPS, False)
    assert "error" not in summary
    assert steps(folder) == STEPS
    assert not summary["dropped_groups"]
    assert "is lost" not in (folder / "logs" / "driver.log").read_text()
    assert (folder / "final" / "model.safetensors").exists()


def test_a_window_that_is_closed_takes_the_screen_and_not_the_run(tmp_path: Path):
    folder = tmp_path / "run"
    with typed(folder) as (terminal, driver):
        terminal.close()
        until(lambda: over(driver), terminal, "no end came")
    check_whole(folder)


def test_ctrl_z_and_fg_stop_the_run_for_longer_than_any_deadline_and_lose_nobody(tmp_path: Path):
    folder = tmp_path / "run"
    with typed(folder) as (terminal, driver):
        terminal.press("\x1a")
        until(lambda: state(driver) == "T", terminal, "Ctrl-Z did not stop it")
        stood = steps(folder)
        time.sleep(AWAY_S)
        assert (state(driver), steps(folder)) == ("T", stood)
        terminal.press("fg\n")
        until(lambda: over(driver), terminal, "no end came")
    check_whole(folder)
