"""Code of a model does no harm: as the user of the tests, and as one without privileges."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from offbeat_trainer.errors import PlanRefused
from offbeat_trainer.rollouts.scorer import find_reward

try:
    from offbeat_recipes.library import code
except RuntimeError as error:  # `NoLockError`
    pytest.skip(str(error), allow_module_level=True)
from offbeat_recipes.library.code import (
    Limits,
    NoLockError,
    answers,
    passes,
    passes_each,
    programs,
    run_each,
    run_python,
    unit_tests,
)

pytestmark = pytest.mark.spawns

HOME = str(Path.home())
HOSTILE = {
    "fork bomb": ("import os\nwhile True: os.fork()", "Resource temporarily unavailable"),
    "ten gigabytes": ("x = bytearray(10 << 30)", "MemoryError"),
    "a large file": ("f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20)), f.flush()", ""),
    "a file of the system": ("open('/usr/x', 'w')", "Read-only file system"),
    "a file of the user": (f"open({HOME!r} + '/.offbeat-test', 'w')", "Error"),
    "a socket": ("import socket; socket.create_connection(('127.0.0.1', 22), 5)", "Network is unreachable"),
    "accounts": ("print(open('/etc/passwd').read())", "No such file"),
    "what others hold": ("print(open('/proc/1/environ').read())", "Permission denied"),
    "another user": ("import os; os.setuid(0)", "Error"),
    "namespaces of its own": (
        "import ctypes, os; l = ctypes.CDLL(None, use_errno=True); assert l.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())",
        "Operation not permitted",
    ),
}
SOME_LIMITS = Limits(seconds=20, memory_mib=256, processes=8, files_mib=4)
AS_ANOTHER = """
import json, sys
from offbeat_recipes.library.code import Limits, run_python
limits = Limits(seconds=20, memory_mib=256, processes=8, files_mib=4)
ended = {name: run_python(source, limits=limits) for name, source in json.loads(sys.argv[1]).items()}
print(json.dumps({name: [one.code, one.output, one.reason] for name, one in ended.items()}))
"""


def assert_stopped(name, number, output, reason):
    assert number != 0, name
    assert HOSTILE[name][1] in output + reason, (name, output, reason)


def test_what_a_program_does_in_peace():
    ended = run_python("import os, sys; print(sys.stdin.read(), len(os.environ), os.getcwd())", "asked")
    assert (ended.ok, ended.output) == (True, "asked 1 /tmp\n")
    ended = run_python("open('a', 'w').write('b'); print(open('a').read()); raise SystemExit(3)")
    assert (ended.code, ended.output, ended.reason, ended.ok) == (3, "b\n", "", False)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_program_cannot(name):
    ended = run_python(HOSTILE[name][0], limits=SOME_LIMITS)
    assert_stopped(name, ended.code, ended.output, ended.reason)


def test_neither_can_one_of_a_user_without_privileges():
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(Path(code.__file__).parent, folder / "offbeat_recipes" / "library")
        (folder / "offbeat_recipes" / "__init__.py").touch()
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        user = ["setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups"] if os.getuid() == 0 else []
        sources = json.dumps({name: source for name, (source, _) in HOSTILE.items()})
        done = subprocess.run(
            [*user, "/usr/bin/python3", "-B", "-c", AS_ANOTHER, sources],
            env={"PYTHONPATH": str(folder)}, cwd="/", capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        for name, (number, output, reason) in json.loads(done.stdout).items():
            assert_stopped(name, number, output, reason)
    finally:
        shutil.rmtree(folder)


def test_a_program_ends_in_time_with_all_that_it_started(tmp_path):
    ended = run_python("while True: pass", limits=Limits(seconds=1))
    assert (ended.ok, ended.reason) == (False, "it took longer than 1 s")
    word = f"left {tmp_path}"
    source = f"import os, time\nif os.fork() == 0:\n    os.setsid(); os.execv({os.path.realpath(sys.executable)!r}, ['python', '-c', 'import time; time.sleep(1000)', {word!r}])\ntime.sleep(1)"
    assert run_python(source).ok
    deadline = time.monotonic() + 60
    while any(
        word.encode() in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()
    ):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.1)


def test_tests_decide_and_neither_an_early_end_nor_a_word_does():
    right = "Here it is:\n```python\ndef f(x):\n    return x + 1\n```\n"
    assert unit_tests([right], [["assert f(1) == 2", "assert f(2) == 3"]]) == [1]
    assert unit_tests(["def f(x): return x"], ["assert f(1) == 2"]) == [0]
    assert "AssertionError" in passes("def f(x): return x", "assert f(1) == 2").output
    for early in ("raise SystemExit(0)", "import os; os._exit(0)", "print('all tests passed'); exit()"):
        assert passes(early, "assert f(1) == 2").reason == "it ended before its tests did", early
    assert "SyntaxError" in passes("def f(:", "pass").output


LEAVES = """
import os, sys, time
open("left", "w").write("x")
if os.fork() == 0:
    os.setsid()
    while True: time.sleep(0.01); open("/tmp/left", "a").write("x")
import ctypes
assert ctypes.CDLL(None).shmget(77, 4096, 0o1600) >= 0  # IPC_CREAT
try: os.kill(1, 9), os.kill(-1, 19)
except OSError: pass
"""
MEETS = """
import ctypes, glob, os
print(sorted(os.listdir(".")), [one for one in glob.glob("/proc/[0-9]*") if int(one[6:]) not in (1, os.getpid())])
print(ctypes.CDLL(None).shmget(77, 4096, 0o600))
"""


def test_programs_that_run_together_meet_nothing_of_each_other():
    left, late, met, early = run_each(
        [(LEAVES, ""), ("while True: pass", ""), (MEETS, "asked"), ("raise SystemExit(125)", "")],
        Limits(seconds=3),
    )
    assert left.reason == "signal 19 ended it" or left.ok or left.reason.startswith("it took"), left
    assert late.reason == "it took longer than 3 s"
    assert (met.ok, met.output) == (True, "['main.py', 'stdin'] []\n-1\n")
    assert (early.code, early.reason) == (125, "")


def test_a_batch_is_what_its_completions_are_one_by_one():
    completions = [
        "def f(x): return x",
        "raise SystemExit(0)",
        "def f(x): return x + 1",
        "import os; os.kill(os.getpid(), 9)",
        "def f(:",
    ] * 2
    tests = ["assert f(1) == 2"] * 10
    together = passes_each(completions, tests, Limits(seconds=10))
    assert [one.ok for one in together] == [False, False, True, False, False] * 2
    apart = [passes(one, "assert f(1) == 2", Limits(seconds=10)) for one in completions[:5]]
    assert [(one.code, one.reason) for one in together[:5]] == [(one.code, one.reason) for one in apart]
    assert unit_tests(completions[:3] * 4, tests[:1] * 12) == [0, 0, 1] * 4


def test_a_program_reads_and_writes():
    cases = [{"input": "1 2\n", "output": "3"}, {"input": "5 5\n", "output": "10\n"}]
    assert programs("print(sum(map(int, input().split())))", cases) == 1
    assert answers("print(3)", cases) == 0.5
    assert programs("print(3)", cases) == 0


def test_where_code_cannot_be_locked_up_it_is_refused_before_a_run_unless_told(monkeypatch):
    monkeypatch.setattr(code, "_is_lockable", lambda: "no namespaces")
    with pytest.raises(NoLockError, match="--privileged"):
        run_python("pass")
    monkeypatch.setenv(code.UNLOCKED, "1")
    ended = run_python("import os; print(os.getuid())", limits=SOME_LIMITS)
    assert (ended.code, ended.output) == (0, f"{os.getuid()}\n")
    assert "MemoryError" in run_python(HOSTILE["ten gigabytes"][0], limits=SOME_LIMITS).output
    assert run_python("while True: pass", limits=Limits(seconds=1)).reason == "it took longer than 1 s"


def test_both_are_rewards_of_a_run():
    for name, *wants in (("unit_tests", "completions", "tests"), ("programs", "completion", "cases")):
        path, column = f"offbeat_recipes.library.code:{name}", wants[1]
        assert find_reward(path, 1.0, {"prompt": "", column: ""}).wants == set(wants)
        with pytest.raises(PlanRefused, match=column):
            find_reward(path, 1.0, {"prompt": ""})
