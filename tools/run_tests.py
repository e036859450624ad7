"""Run the tests of a tier in two passes and close with one line that counts them all.

The usual tier runs everything once; `--fast` leaves out what takes its time, and `--deep` adds what crosses or repeats
what the others have once (the marker `deep`, and the counts that the root conftest.py hands to tests).

Ordinary tests have four worker processes; they keep two cores busy, some of them with waiting for a deadline. Those that
start Ray or vLLM spend their time in chains of processes that wait for one another to come up: they have three worker
processes, each file its own, and where there is a GPU, which none would share, one. On four cores or more the passes run
side by side: the chains go first, and ordinary tests, at a lower priority, take what is left. One after the other they have
the priority of anyone: whatever else runs on the machine would starve them. The first pass is seen as it
goes, the other when it is over. Each writes a JUnit file; the closing line is computed from those files and from pytest's
exit codes, so that a pass that crashed, ran out of time or found no test counts as an error and is not lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 30
GPU_DRIVER = Path("/dev/nvidiactl")
NUM_SLOWEST = 15  # tests of a pass that are shown with the time they took
NO_TESTS = 5  # pytest's exit code for "nothing was collected"
# pytest-xdist opens its own processes: one thread each keeps two workers from fighting over two cores.
# Torch's compiler would open a pool of them too, each of which imports torch, for graphs of a few kernels.
# Some machines keep no bytecode: each of hundreds of processes would compile packages and tests anew.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One run of pytest: the tests that `markers` selects, with `options`; it yields to those of lower `niceness`."""

    name: str
    markers: str
    options: tuple[str, ...] = ()
    niceness: int = 0


# Each worker begins with its share of the tests in their order, and takes from the others' rest when it is done: files
# stay together as far as all can be kept busy to the end.
PARALLEL = ("-n", "4", "--dist", "worksteal")
# What a file has started serves all of its tests. A worker that is taken down is not started again: it would be taken down
# by the same test.
BY_FILE = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0", "--chains")
CHAINED = "vllm or ray or gpu" if GPU_DRIVER.exists() else "vllm or ray"  # without a GPU, its tests are skips
FULL = (
    Pass(name="parallel", markers=f"not ({CHAINED})", options=PARALLEL, niceness=5),
    Pass(name="chains", markers=CHAINED, options=() if GPU_DRIVER.exists() else BY_FILE),
)
FAST = Pass(name="fast", markers="not (vllm or ray or gpu or slow or spawns)", options=PARALLEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Passes, each of which is stopped after `pass_deadline_s`: five times what all of them take on two quiet cores."""

    passes: tuple[Pass, ...]
    pass_deadline_s: float


USUAL = "usual"
TIERS = {
    "fast": Tier(passes=(FAST,), pass_deadline_s=15 * 60),
    USUAL: Tier(passes=FULL, pass_deadline_s=60 * 60),
    "deep": Tier(
        passes=tuple(replace(one, options=(*one.options, "--deep")) for one in FULL), pass_deadline_s=4 * 3600
    ),
}


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


def trouble(outcome: Outcome, *, deadline_s: float, expects_tests: bool) -> str | None:
    """Return what went wrong with a whole pass beyond its failed tests, or None."""
    match outcome:
        case Outcome(exit_code=None):
            return f"not finished within {deadline_s:g} s; stopped"
        case Outcome(exit_code=0, has_report=True) if outcome.num_tests > 0:
            return None
        case Outcome(exit_code=1 | 2, has_report=True) if outcome.red:
            return None
        case Outcome(exit_code=5, num_tests=0):
            return "found no test, and some are expected" if expects_tests else None
        case _:
            return f"pytest exited {outcome.exit_code} and its report does not say why"


async def run_passes(tier: Tier, arguments: list[str], folder: Path, at_once: int) -> list[Outcome]:
    """Run the passes of a tier, `at_once` of them side by side, and return their outcomes."""
    turns = asyncio.Semaphore(at_once)

    async def take_turn(chosen: Pass) -> Outcome:
        if at_once == 1:
            chosen = replace(chosen, niceness=0)
        async with turns:
            report = folder / f"{chosen.name}.xml"
            if chosen.name == tier.passes[0].name:
                print(title(chosen), flush=True)
                exit_code = await run_pass(chosen, arguments, report, tier.pass_deadline_s)
            else:
                exit_code = await run_and_print(chosen, arguments, report, tier.pass_deadline_s)
        return read_outcome(chosen.name, exit_code, report)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(take_turn(chosen)) for chosen in tier.passes]
    return [task.result() for task in tasks]


def title(chosen: Pass) -> str:
    """Return the line above a pass's output."""
    return f"\n--- tests: {chosen.name} ({chosen.markers})"


async def run_and_print(chosen: Pass, arguments: list[str], report: Path, deadline_s: float) -> int | None:
    """Run one pass and print what it said when it is over."""
    log = report.with_suffix(".log")
    with log.open("w") as file:
        exit_code = await run_pass(chosen, arguments, report, deadline_s, log=file)
    print(f"{title(chosen)}\n{log.read_text(errors='replace')}", flush=True)
    return exit_code


async def run_pass(
    chosen: Pass, arguments: list[str], report: Path, deadline_s: float, log: TextIO | None = None
) -> int | None:
    """Run pytest for one pass and return its exit code, or None if it had to be stopped; it leaves nothing running.

    Its output goes to `log` or to where ours goes.
    """
    words = ["-m", "pytest", "-m", chosen.markers, f"--junitxml={report}", f"--durations={NUM_SLOWEST}"]
    process = await asyncio.create_subprocess_exec(
        *("nice", "-n", str(chosen.niceness), sys.executable, *words, *chosen.options, *arguments),
        env={**os.environ, **ENVIRONMENT},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    let_others_first(process.pid, chosen.niceness)
    exit_code: int | None = None
    try:
        async with asyncio.timeout(deadline_s):
            exit_code = await process.wait()
    except TimeoutError:
        pass
    except asyncio.CancelledError:  # Ctrl-C: pytest says what it has
        os.killpg(process.pid, signal.SIGINT)
        async with asyncio.timeout(GRACE_S):
            await process.wait()
        raise
    finally:
        await end_session(process)
    return exit_code


def let_others_first(session: int, niceness: int) -> None:
    """Give all of `session` that niceness: Linux shares a machine out by session, and by niceness only within one."""
    with suppress(OSError):  # not on every kernel
        Path(f"/proc/{session}/autogroup").write_text(str(niceness))


async def end_session(process: asyncio.subprocess.Process) -> None:
    """End `process` and what it started, if any of it still runs."""
    with suppress(ProcessLookupError):  # nothing was left
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await process.wait()
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def num_killed_for_memory() -> int:
    """Return how many processes the kernel has killed since it started for want of memory."""
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counters.get("oom_kill", 0))


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


def usual_at_once() -> int:
    """Return how many passes fit side by side: on a GPU, or on two cores, they would keep each other from starting in time."""
    return 1 if GPU_DRIVER.exists() or len(os.sched_getaffinity(0)) < 4 else len(FULL)


def main() -> None:
    """Run the passes; exit 1 if anything was red, a pass broke, or tests that should exist were not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    chosen = parser.add_mutually_exclusive_group()
    for name, text in (
        ("fast", "leave out tests marked vllm, ray, gpu, slow or spawns"),
        ("deep", "tests marked deep too, and full counts in all others"),
    ):
        chosen.add_argument(
            f"--{name}", dest="tier", action="store_const", const=name, default=USUAL, help=text
        )
    parser.add_argument("--red-gates", default="", help="gates that were red, to be named beside red tests")
    parser.add_argument(
        "--at-once", type=int, default=usual_at_once(), help="passes that run side by side; %(default)s here"
    )
    parser.add_argument("paths", nargs="*", help="packages by short name, or paths; all by default")
    options = parser.parse_args()
    # A shell ignores Ctrl-C for what it starts in the background, and children inherit that: some tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    paths = paths_of(options.paths)
    tier = TIERS[options.tier]
    started, killed_before = time.monotonic(), num_killed_for_memory()
    with tempfile.TemporaryDirectory(prefix="offbeat-tests-") as folder:
        os.environ["OFFBEAT_TEST_FAULTS"] = folder
        outcomes = asyncio.run(run_passes(tier, paths, Path(folder), options.at_once))
        if any(outcome.exit_code for outcome in outcomes):
            faults = Path(folder).glob("fault-*.txt")
            print(*(report.read_text(errors="replace") for report in faults), sep="")
    # Narrowed to some paths a pass may well be empty; all passes together may not.
    must_all_find = not paths or not any(outcome.num_tests for outcome in outcomes)
    print()
    num_troubles = 0
    for outcome in outcomes:
        print("\n".join(outcome.red), end="\n" if outcome.red else "")
        problem = trouble(outcome, deadline_s=tier.pass_deadline_s, expects_tests=must_all_find)
        if problem is not None:
            num_troubles += 1
            print(f"error: tests {outcome.name}: {problem}")
    if (num_killed := num_killed_for_memory() - killed_before) > 0:
        print(f"the kernel killed {num_killed} process(es) of this machine meanwhile: it had no memory left")
    if options.red_gates:
        print(f"red gates: {options.red_gates}")
    print(closing_line(outcomes, num_troubles, time.monotonic() - started))
    is_green = not num_troubles and not options.red_gates and not any(outcome.red for outcome in outcomes)
    sys.exit(0 if is_green else 1)


if __name__ == "__main__":
    main()
