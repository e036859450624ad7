"""Run the tests in passes and close with one line that counts them all.

Ordinary tests share two worker processes. Tests that need the machine to themselves follow one after
another, in one process for those that start Ray or use a GPU and in one for those that start vLLM. Each pass
writes a JUnit file; the closing line is computed from those files and from pytest's exit codes, so that a
pass that crashed, ran out of time or found no test counts as an error and is not lost.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PASS_DEADLINE_S = 1500
GRACE_S = 30
NO_TESTS = 5  # pytest's exit code for "nothing was collected"
# pytest-xdist opens its own processes: one thread each keeps two workers from fighting over two cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One run of pytest: the tests that `markers` selects, with `options`."""

    name: str
    markers: str
    options: tuple[str, ...] = ()


PARALLEL = ("-n", "2", "--dist", "loadfile")
FULL = (
    Pass(name="parallel", markers="not (vllm or ray or gpu)", options=PARALLEL),
    Pass(name="ray-and-gpu", markers="(ray or gpu) and not vllm"),
    Pass(name="vllm", markers="vllm"),
)
FAST = (Pass(name="fast", markers="not (vllm or ray or gpu or slow)", options=PARALLEL),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a pass came to: pytest's exit code (None: out of time) and the tests of its JUnit file by verdict."""

    name: str
    exit_code: int | None
    counts: Counter[str]
    red: tuple[str, ...] = ()
    has_report: bool = True

    @property
    def num_tests(self) -> int:
        """How many tests ran or were skipped."""
        return self.counts.total()


def verdict(case: ElementTree.Element) -> str:
    """Return what became of one JUnit test case."""
    if case.find("error") is not None:
        return "error"
    if case.find("failure") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def read_outcome(name: str, exit_code: int | None, report: Path) -> Outcome:
    """Return the outcome of a pass from its JUnit file, which may be missing or cut off."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError):
        return Outcome(name=name, exit_code=exit_code, counts=Counter(), has_report=False)
    verdicts = [(verdict(case), f"{case.get('classname')}::{case.get('name')}") for case in cases]
    red = tuple(f"{kind}: {test}" for kind, test in verdicts if kind in ("failed", "error"))
    return Outcome(name=name, exit_code=exit_code, counts=Counter(kind for kind, _ in verdicts), red=red)


def trouble(outcome: Outcome, *, expects_tests: bool) -> str | None:
    """Return what went wrong with a whole pass beyond its failed tests, or None."""
    match outcome:
        case Outcome(exit_code=None):
            return f"not finished within {PASS_DEADLINE_S} s; stopped"
        case Outcome(exit_code=0, has_report=True) if outcome.num_tests > 0:
            return None
        case Outcome(exit_code=1 | 2, has_report=True) if outcome.red:
            return None
        case Outcome(exit_code=5, num_tests=0):
            return "found no test, and some are expected" if expects_tests else None
        case _:
            return f"pytest exited {outcome.exit_code} and its report does not say why"


def run_pass(chosen: Pass, arguments: list[str], report: Path) -> Outcome:
    """Run pytest for one pass and return what came of it; whatever it left running is ended with it."""
    command = [sys.executable, "-m", "pytest", "-m", chosen.markers, f"--junitxml={report}"]
    print(f"\n--- tests: {chosen.name} ({chosen.markers})", flush=True)
    process = subprocess.Popen(
        [*command, *chosen.options, *arguments], env={**os.environ, **ENVIRONMENT}, start_new_session=True
    )
    exit_code: int | None = None
    try:
        exit_code = process.wait(timeout=PASS_DEADLINE_S)
    except subprocess.TimeoutExpired:
        pass
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=GRACE_S)
        raise
    finally:
        end_session(process)
    return read_outcome(chosen.name, exit_code, report)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End `process` and what it started, if any of it still runs."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing was left
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=GRACE_S)


def closing_line(outcomes: list[Outcome], num_troubles: int, wall_s: float) -> str:
    """Return the one line that counts every test of every pass."""
    total: Counter[str] = Counter(passed=0, failed=0, skipped=0, error=num_troubles, xfailed=0)
    for outcome in outcomes:
        total.update(outcome.counts)
    words = [f"{total[kind]} {kind}" for kind in ("passed", "failed", "skipped")]
    words += [f"{total[kind]} {kind}" for kind in ("error", "xfailed") if total[kind]]
    return f" {', '.join(words)} in {wall_s:.1f}s ".center(80, "=")


def paths_of(words: list[str]) -> list[str]:
    """Return the paths that `words` name: a package by its short name, or any path as it stands."""
    packages = {folder.name for folder in (ROOT / "packages").iterdir()}
    return [f"packages/{word}" if word in packages else word for word in words]


def main() -> None:
    """Run the passes; exit 1 if anything was red, a pass broke, or tests that should exist were not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out tests marked vllm, ray, gpu or slow")
    parser.add_argument("--red-gates", default="", help="gates that were red, to be named beside red tests")
    parser.add_argument("paths", nargs="*", help="packages by short name, or paths; all by default")
    options = parser.parse_args()
    paths = paths_of(options.paths)
    passes = FAST if options.fast else FULL
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="offbeat-tests-") as folder:
        outcomes = [run_pass(chosen, paths, Path(folder) / f"{chosen.name}.xml") for chosen in passes]
    # Narrowed to some paths a pass may well be empty; all passes together may not.
    must_all_find = not paths or not any(outcome.num_tests for outcome in outcomes)
    print()
    num_troubles = 0
    for outcome in outcomes:
        print("\n".join(outcome.red), end="\n" if outcome.red else "")
        problem = trouble(outcome, expects_tests=must_all_find)
        if problem is not None:
            num_troubles += 1
            print(f"error: tests {outcome.name}: {problem}")
    if options.red_gates:
        print(f"red gates: {options.red_gates}")
    print(closing_line(outcomes, num_troubles, time.monotonic() - started))
    is_green = not num_troubles and not options.red_gates and not any(outcome.red for outcome in outcomes)
    sys.exit(0 if is_green else 1)


if __name__ == "__main__":
    main()
