"""Code that a model wrote, run where it can do no harm; a reward of unit tests."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_recipes.library import _locked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNLOCKED = "OFFBEAT_RUNS_CODE_UNLOCKED"
"""The environment variable that, set to 1, runs code with limits alone where this machine gives no namespaces."""
_FENCE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_NUMBERS = count()
_GRACE_S = 60.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use: seconds by the clock, MiB of memory a process, processes, MiB of files, which are all in memory."""

    seconds: float = 5.0
    memory_mib: int = 512
    processes: int = 16
    files_mib: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended. `code` is its exit code; `reason` says in words what else ended it, "" where nothing did.

    `output` is what it wrote to standard output and error, as much as it may write to a file.
    """

    code: int
    output: str
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether it came to a good end."""
        return self.code == 0 and not self.reason


class NoLockError(RuntimeError):
    """This machine gives a process no namespaces of its own."""


def run_python(source: str, stdin: str = "", limits: Limits | None = None) -> Ended:
    """Run a program of plain Python where it reads Python and the system's libraries, and nothing else of this machine.

    It has an empty folder to write to, which is gone afterwards, no network, no environment variables, no other processes to see,
    and `limits`. What it started ends with it.

    Raises:
        NoLockError: the kernel gives no namespaces; `OFFBEAT_RUNS_CODE_UNLOCKED=1` runs it with limits alone, as the user.
    """
    require_lock()
    return _run(source, stdin, Limits() if limits is None else limits, locked=_is_lockable() == "")


def require_lock() -> None:
    """Raise `NoLockError` where code cannot be locked up, unless it may run unlocked."""
    why = _is_lockable()
    if why and os.environ.get(UNLOCKED) != "1":  # noqa: TID251 - asked for by whoever starts the run
        raise NoLockError(
            f"code of a model cannot be locked up here ({why}); allow namespaces (in a container: --security-opt seccomp=unconfined, or "
            f"--privileged), or {UNLOCKED}=1 runs it as you, with limits of time and memory alone"
        )


def passes(completion: str, tests: str | Sequence[str], limits: Limits | None = None) -> Ended:
    """Run the code of a completion and then `tests`, statements that raise where it is wrong, in the same names.

    The code is the last block of Python in the completion, or all of it. Code that ends early has not passed. Code that looks for a way
    to deceive tests in its own process finds one: hold that against programs by `answers`.
    """
    word = secrets.token_hex(8)
    parts = [code_of(completion), *([tests] if isinstance(tests, str) else tests)]
    ended = run_python(_TESTED.format(parts=parts), stdin=word, limits=limits)
    if ended.ok and word not in ended.output:
        return replace(ended, code=1, reason="it ended before its tests did")
    return replace(ended, output=ended.output.removesuffix(f"{word}\n"))


def answers(completion: str, cases: Sequence[Mapping[str, str]], limits: Limits | None = None) -> float:
    """Return the share of `cases` in which the program of a completion reads "input" and writes "output", but for blanks at ends of lines."""
    source = code_of(completion)

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    ended = [(case, run_python(source, case["input"], limits)) for case in cases]
    return sum(one.ok and lines(one.output) == lines(case["output"]) for case, one in ended) / len(ended)


def code_of(completion: str) -> str:
    """Return the last block of Python in a text, or all of it where there is none."""
    blocks: list[str] = _FENCE.findall(completion)
    return blocks[-1] if blocks else completion


def unit_tests(completion: str, tests: str | list[str]) -> float:
    """Return 1 for code that passes the column `tests`, else 0: `task.reward=offbeat_recipes.library.code:unit_tests`."""
    return float(passes(completion, tests).ok)


def programs(completion: str, cases: list[dict[str, str]]) -> float:
    """Return 1 for a program that answers all of the column `cases`, else 0; see `answers`."""
    return float(answers(completion, cases) == 1)


_TESTED = """\
def run():
    word, names = input(), {{"__name__": "__main__"}}
    for part in {parts!r}:
        exec(compile(part, "<code>", "exec"), names)
    print(word)
run()
"""


def _run(source: str, stdin: str, limits: Limits, *, locked: bool) -> Ended:
    with tempfile.TemporaryDirectory(prefix="offbeat-") as name:
        folder, output = Path(name), Path(name) / "output"
        for part in ("root", "work"):
            (folder / part).mkdir()
        python = os.path.realpath(sys.executable)
        job = {
            "locked": locked,
            "root": str(folder / "root"),
            "folder": str(folder / "work"),
            "python": python,
            "keep": [sys.base_prefix]
            if not sys.base_prefix.startswith("/usr/") and sys.base_prefix != "/usr"
            else [],
            "files_mib": limits.files_mib,
            "number": os.getpid() * 64 + next(_NUMBERS) % 64,
            "source": source,
            "stdin": stdin,
            "limits": {
                "CPU": int(limits.seconds) + 1,
                "AS": limits.memory_mib * _MIB,
                "FSIZE": limits.files_mib * _MIB,
                "NPROC": limits.processes,
                "NOFILE": 64,
                "CORE": 0,
            },
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        with output.open("wb") as file:
            process = subprocess.Popen(
                [python, "-I", "-S", "-B", str(_locked.__file__), str(folder / "job.json")],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={}, cwd=name, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(limits.seconds)
                reason = ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # locked up, all ends with its first process
                code, reason = process.wait(_GRACE_S), f"it took longer than {limits.seconds:g} s"
        text = output.read_bytes().decode(errors="replace")
    return _ended(code, text, reason)


def _ended(code: int, text: str, reason: str) -> Ended:
    if not reason and code == _locked.LOCK_FAILED:
        raise NoLockError(text.strip() or "code could not be locked up")
    if not reason and (code < 0 or code > 128):
        reason = f"signal {-code if code < 0 else code - 128} ended it"
    return Ended(code=code, output=text, reason=reason)


@cache
def _is_lockable() -> str:
    """Return why code cannot be locked up on this machine, "" where it can."""
    try:
        ended = _run("print('locked up')", "", Limits(seconds=60), locked=True)
    except (NoLockError, OSError) as error:
        return str(error)
    return "" if ended.output == "locked up\n" else f"exit code {ended.code}: {ended.output.strip()[-300:]}"


# Whoever names one of these as a reward is told before a run starts, not by its first call.
require_lock()
