"""Each tier runs what it should; the closing line counts every test of every pass, and nothing that went wrong is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spawns

ROOT = Path(__file__).resolve().parents[2]
RUN_TESTS = ROOT / "tools" / "run_tests.py"
TIERED = """
import pathlib
import pytest
from hypothesis import given, settings, strategies

def note(word): (pathlib.Path(__file__).parent / "ran" / word).touch()

@given(strategies.integers())
def test_ordinary(number): note(f"ordinary: {settings().max_examples} examples, deadline {settings().deadline}")
def test_that_repeats(deep): note("many" if deep else "few")
@pytest.mark.slow
def test_slow(): note("slow")
@pytest.mark.spawns
def test_spawns(): note("spawns")
@pytest.mark.ray
def test_chain(): note("chain")
@pytest.mark.deep
def test_deep(): note("deep")
@pytest.mark.deep
@pytest.mark.ray
def test_deep_chain(): note("deep chain")
@pytest.mark.parametrize("word", ["once", pytest.param("often", marks=pytest.mark.deep)])
def test_product(word): note(word)
"""
MIXED = """
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip(reason="here")
def test_skips(): pass
@pytest.mark.xfail
def test_known(): assert False
@pytest.fixture
def broken(): raise RuntimeError("no")
def test_cannot_start(broken): pass
"""
CRASH = """
import os, pytest

@pytest.mark.ray
def test_takes_the_process_down(): os._exit(0)
"""
FAULT = """
import os, signal

def test_reads_what_is_not_there(): os.kill(os.getpid(), signal.SIGSEGV)
def test_passes(): pass
"""

GONE = """
import os

def pytest_sessionfinish(session):
    if session.config.option.markexpr.startswith("vllm"):
        os._exit(0)
"""

MEETING = """
import pathlib, time
import pytest

def meet(mine, other):
    here = pathlib.Path(__file__).parent
    (here / mine).touch()
    deadline = time.monotonic() + 600
    while not (here / other).exists():
        assert time.monotonic() < deadline, f"{other} did not come while {mine} was here"
        time.sleep(0.02)

def test_ordinary(): meet("ordinary", "alone")
@pytest.mark.ray
def test_alone(): meet("alone", "ordinary")
"""


@pytest.fixture(autouse=True)
def only_needed_plugins(monkeypatch):
    """Start pytest without the plugins of the workspace and with one worker: each of these tests starts it several times."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin --maxprocesses 1")


def run(small_checkout, *arguments: str):
    ran = small_checkout.run(sys.executable, str(RUN_TESTS), *arguments, str(small_checkout.root / "suite"))
    return ran.returncode, ran.stdout, ran.stdout.splitlines()[-1].strip("= ").rpartition(" in ")[0]


def write_suite(small_checkout, **files: str) -> None:
    markers = "".join(f"    {name}\n" for name in ("ray", "vllm", "gpu", "slow", "spawns", "deep"))
    small_checkout.write("suite/pytest.ini", f"[pytest]\naddopts = --strict-markers\nmarkers =\n{markers}")
    shutil.copy(ROOT / "conftest.py", small_checkout.root / "suite" / "conftest.py")
    for name, text in files.items():
        small_checkout.write(f"suite/test_{name}.py", text)


FEW = {"ordinary: 50 examples, deadline None", "few", "once"}
USUAL = {*FEW, "slow", "spawns", "chain"}
MANY = {"ordinary: 500 examples, deadline None", "many", "once", "often"}
DEEP = {*MANY, "slow", "spawns", "chain", "deep", "deep chain"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ran"), [(["--fast"], FEW), ([], USUAL), pytest.param(["--deep"], DEEP, marks=pytest.mark.deep)]
)
def test_each_tier_runs_its_tests_with_its_counts(small_checkout, words, ran):
    write_suite(small_checkout, tiered=TIERED)
    folder = small_checkout.root / "suite" / "ran"
    folder.mkdir()
    code, _, closing = run(small_checkout, *words)
    assert (code, closing) == (0, f"{len(ran)} passed, 0 failed, 0 skipped")
    assert {file.name for file in folder.iterdir()} == ran


def test_a_run_has_one_tier(small_checkout):
    ran = small_checkout.run(sys.executable, str(RUN_TESTS), "--fast", "--deep")
    assert ran.returncode == 2
    assert "not allowed with" in ran.stdout


@pytest.mark.slow
def test_every_verdict_and_a_crash_are_counted(small_checkout):
    write_suite(small_checkout, mixed=MIXED, crash=CRASH)
    code, output, closing = run(small_checkout)
    assert code == 1
    assert closing == "1 passed, 1 failed, 1 skipped, 2 error, 1 xfailed"  # the crash left with exit code 0
    assert "test_takes_the_process_down" in output.splitlines()[-2]


@pytest.mark.slow
def test_a_fault_of_a_worker_is_shown_below_all_that_was_printed_meanwhile(small_checkout):
    write_suite(small_checkout, fault=FAULT)
    code, output, closing = run(small_checkout, "--fast")
    assert (code, closing) == (1, "1 passed, 0 failed, 0 skipped, 1 error")
    assert "Fatal Python error: Segmentation fault" in output.rpartition("1 failed, 1 passed")[2]


@pytest.mark.slow
def test_a_pass_that_ends_without_a_report_is_an_error(small_checkout):
    write_suite(small_checkout, mixed="def test_passes(): pass\n")
    small_checkout.write("suite/conftest.py", (ROOT / "conftest.py").read_text() + GONE)
    code, output, closing = run(small_checkout)
    assert (code, closing) == (1, "1 passed, 0 failed, 0 skipped, 1 error")
    assert "tests chains: pytest exited 0 and its report does not say why" in output


@pytest.mark.slow
def test_passes_run_side_by_side_and_all_are_seen(small_checkout):
    write_suite(small_checkout, meeting=MEETING)
    code, output, closing = run(small_checkout, "--at-once", "2")
    assert (code, closing) == (0, "2 passed, 0 failed, 0 skipped")
    for name in ("parallel", "chains"):
        assert f"--- tests: {name} (" in output
    assert output.count("1 passed") == 2
    assert output.count("slowest 15 durations") == 2


@pytest.mark.deep
def test_green_only_with_tests_and_without_red_gates(small_checkout):
    write_suite(small_checkout)
    code, output, closing = run(small_checkout, "--fast")
    assert code == 1
    assert "found no test, and some are expected" in output
    write_suite(small_checkout, fine="def test_passes(): pass\n")
    code, _, closing = run(small_checkout, "--fast")
    assert (code, closing) == (0, "1 passed, 0 failed, 0 skipped")
    code, output, closing = run(small_checkout, "--fast", "--red-gates", "lint types")
    assert (code, closing) == (1, "1 passed, 0 failed, 0 skipped")
    assert "red gates: lint types" in output


def test_a_file_that_cannot_be_collected_is_an_error(small_checkout):
    write_suite(small_checkout, fine="def test_passes(): pass\n", broken="import no_such_module\n")
    code, _, closing = run(small_checkout, "--fast")
    assert code == 1
    assert "1 error" in closing


@pytest.mark.spawns
@pytest.mark.deep
def test_no_chained_test_hides_from_the_pass_that_reads_only_files_which_name_its_marks():
    look = (sys.executable, "-m", "pytest", "--collect-only", "-q", "--deep", "-m", "vllm or ray")
    with_plugins = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found: list[set[str]] = []
    for more in ((), ("--chains",)):
        done = subprocess.run(
            (*look, *more),
            cwd=ROOT,
            env=with_plugins,
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
        found.append({line for line in done.stdout.splitlines() if "::" in line})
    assert len(found[0]) > 100
    assert found[0] == found[1]
