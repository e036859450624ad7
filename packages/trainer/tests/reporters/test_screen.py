"""A screen that goes away takes nothing with it: real pipes and terminals whose other end is closed."""

import io
import os
import subprocess
import sys

import pytest

from offbeat_trainer.watch.console import ConsoleReporter
from offbeat_trainer.watch.fanout import Screen


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def closed_terminal():
    master, slave = os.openpty()
    os.close(master)
    return os.fdopen(slave, "w")


def full_disk():
    return open("/dev/full", "w")


@pytest.mark.parametrize("make", [closed_pipe, closed_terminal, full_disk])
def test_what_nobody_reads_is_dropped_and_the_stream_can_be_closed(make):
    stream = make()
    screen = Screen(stream)
    for _ in range(3):
        assert screen.write("a line\n") == 7
        screen.flush()
    stream.close()  # nothing is left in its buffer that could fail


def test_what_is_read_arrives():
    stream = io.StringIO()
    screen = Screen(stream)
    screen.write("a ✓")
    assert stream.getvalue() == "a ✓"


def test_letters_that_the_encoding_has_not_become_question_marks():
    raw = io.BytesIO()
    screen = Screen(io.TextIOWrapper(raw, encoding="ascii"))
    screen.write("✓ start · β\n")
    screen.flush()
    assert raw.getvalue() == b"? start ? ?\n"


SHOW = """
from offbeat_trainer.watch.console import ConsoleReporter
console = ConsoleReporter(title="a run")
for number in range(100):
    console.phase(f"phase {number}", "\\u00b7 with a dot \\u2713")
console.summary({"steps": 3})
console.close()
"""


@pytest.mark.spawns
@pytest.mark.parametrize("stdout", [closed_pipe, closed_terminal, full_disk])
def test_a_process_whose_screen_is_gone_ends_well(stdout):
    with stdout() as stream:
        done = subprocess.run(
            [sys.executable, "-c", SHOW],
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            timeout=600,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.spawns
def test_a_locale_that_is_ascii_is_written_to(tmp_path):
    # In a checkout whose path is not ASCII, Python does not start in this locale: it cannot read the .pth files that name the
    # packages. Without `site` it reads none, and finds the packages by PYTHONPATH.
    plain = {
        "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-S", "-c", SHOW], capture_output=True, env=plain, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"phase 99" in done.stdout


def test_the_reporter_of_a_run_writes_to_what_is_standard_output_now(capsys):
    console = ConsoleReporter()
    console.phase("start", "now")
    console.close()
    assert "start" in capsys.readouterr().out
