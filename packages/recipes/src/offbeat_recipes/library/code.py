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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat_recipes.library.scripts import lockup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNLOCKED = "OFFBEAT_RUNS_CODE_UNLOCKED"
"""The environment variable that, set to 1, runs code with limits alone where this machine gives no namespaces."""
_FENCE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_NUMBERS = count()
_GRACE_S = 60.0
_TOGETHER = 8
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
    return run_each([(source, stdin)], limits)[0]


def run_each(programs: Sequence[tuple[str, str]], limits: Limits | None = None) -> list[Ended]:
    """Run several programs, each given as its source and standard input, one after the other, each as `run_python` runs one.

    None meets anything of those before. They are locked up together, which costs more than a short program does.

    Raises:
        NoLockError: see `run_python`.
    """
    require_lock()
    limits, locked = Limits() if limits is None else limits, _is_lockable() == ""
    several = [programs] if locked else [[one] for one in programs]
    return [ended for some in several for ended in _run(some, limits, locked=locked)]


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
    return passes_each([completion], [tests], limits)[0]


def passes_each(
    completions: Sequence[str], tests: Sequence[str | Sequence[str]], limits: Limits | None = None
) -> list[Ended]:
    """Return for each completion what `passes` does; see `run_each`."""
    words = [secrets.token_hex(8) for _ in completions]
    parts = [
        [code_of(completion), *([some] if isinstance(some, str) else some)]
        for completion, some in zip(completions, tests, strict=True)
    ]
    programs = [(_TESTED.format(parts=some), word) for some, word in zip(parts, words, strict=True)]
    return [
        replace(ended, code=1, reason="it ended before its tests did")
        if ended.ok and word not in ended.output
        else replace(ended, output=ended.output.removesuffix(f"{word}\n"))
        for ended, word in zip(run_each(programs, limits), words, strict=True)
    ]


def answers(completion: str, cases: Sequence[Mapping[str, str]], limits: Limits | None = None) -> float:
    """Return the share of `cases` in which the program of a completion reads "input" and writes "output", but for blanks at ends of lines."""
    source = code_of(completion)

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    ended = run_each([(source, case["input"]) for case in cases], limits)
    right = [
        one.ok and lines(one.output) == lines(case["output"]) for case, one in zip(cases, ended, strict=True)
    ]
    return sum(right) / len(right)


def code_of(completion: str) -> str:
    """Return the last block of Python in a text, or all of it where there is none."""
    blocks: list[str] = _FENCE.findall(completion)
    return blocks[-1] if blocks else completion


def unit_tests(completions: list[str], tests: list[str | list[str]]) -> list[float]:
    """Return 1 for code that passes its entry of the column `tests`, else 0: `task.reward=offbeat_recipes.library.code:unit_tests`.

    Completions run `_TOGETHER` at a time in one process, several processes at a time: a few endless ones hold up no more than those.
    """
    batches = [slice(place, place + _TOGETHER) for place in range(0, len(completions), _TOGETHER)]
    with ThreadPoolExecutor(len(batches) or 1) as threads:
        ended = threads.map(
            passes_each, [completions[one] for one in batches], [tests[one] for one in batches]
        )
        return [float(one.ok) for batch in ended for one in batch]


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


def _run(programs: Sequence[tuple[str, str]], limits: Limits, *, locked: bool) -> list[Ended]:
    with tempfile.TemporaryDirectory(prefix="offbeat-") as name:
        folder = Path(name)
        for part in ("root", "work"):
            (folder / part).mkdir()
        python = os.path.realpath(sys.executable)
        job = {
            "locked": locked,
            "root": str(folder / "root"),
            "folder": name,
            "work": str(folder / "work"),
            "python": python,
            "keep": [sys.base_prefix]
            if not sys.base_prefix.startswith("/usr/") and sys.base_prefix != "/usr"
            else [],
            "files_mib": limits.files_mib,
            "number": os.getpid() * 64 + next(_NUMBERS) % 64,
            "programs": [{"source": source, "stdin": stdin} for source, stdin in programs],
            "seconds": limits.seconds,
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
        with (folder / "log").open("wb") as file:
            process = subprocess.Popen(
                [python, "-I", "-S", "-B", str(lockup.__file__), str(folder / "job.json")],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={}, cwd=name, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(limits.seconds * len(programs) + _GRACE_S)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # locked up, all ends with its first process
                process.wait(_GRACE_S)
                raise
        if process.returncode:
            said = (folder / "log").read_text(errors="replace").strip()
            raise NoLockError(said or f"code could not be locked up: exit code {process.returncode}")
        ended = (folder / "ended").read_text().split()
        outputs = [
            (folder / f"output-{number}").read_bytes().decode(errors="replace")
            for number in range(len(ended))
        ]
    return [_ended(code, output, limits) for code, output in zip(ended, outputs, strict=True)]


def _ended(code: str, output: str, limits: Limits) -> Ended:
    if code == lockup.LATE:
        return Ended(code=-signal.SIGKILL, output=output, reason=f"it took longer than {limits.seconds:g} s")
    number = int(code)
    return Ended(code=number, output=output, reason=f"signal {-number} ended it" if number < 0 else "")


@cache
def _is_lockable() -> str:
    """Return why code cannot be locked up on this machine, "" where it can."""
    try:
        [ended] = _run([("print('locked up')", "")], Limits(seconds=60), locked=True)
    except (NoLockError, OSError) as error:
        return str(error)
    return "" if ended.output == "locked up\n" else f"exit code {ended.code}: {ended.output.strip()[-300:]}"


# Whoever names one of these as a reward is told before a run starts, not by its first call.
require_lock()
