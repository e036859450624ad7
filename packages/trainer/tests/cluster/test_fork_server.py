"""Ray's workers are forks of a server that has imported what they need, and fresh interpreters wherever that cannot be."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offbeat_trainer.cluster import start_worker
from offbeat_trainer.cluster.fork_server import ENVIRONMENT_VARIABLE, fork_server
from strangers import AS_NOBODY, run_stranger

TIMEOUT_S = 300.0
SAYS = """
import json, os, sys
alone = os.getpgrp() == os.getpid()
told = [sys.argv, __name__, os.environ.get("MINE"), os.getcwd(), sys.path[0], alone, "colorsys" in sys.modules]
print(json.dumps(told))
sys.stderr.write(f"{os.getppid()} {os.getsid(0)}")
"""
CONTEXT = "--serialized-runtime-env-context="

pytestmark = pytest.mark.spawns


@pytest.fixture
def script(tmp_path):
    script = tmp_path / "default_worker.py"
    script.write_text(SAYS)
    return script


def start(script, *, env_vars=None, **settings):
    context = json.dumps({"env_vars": env_vars, "py_executable": sys.executable})
    command = [sys.executable, start_worker.__file__, str(script), "--node=a", "--language=PYTHON"]
    return subprocess.Popen(
        [*command, CONTEXT + context],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def answer(script, **settings):
    """Return what a worker says of itself, and the process ids of its parent and session."""
    with start(script, **settings) as worker:
        said, pids = worker.communicate(timeout=TIMEOUT_S)
    assert worker.returncode == 0, pids
    return json.loads(said), *map(int, pids.split())


def test_a_fork_has_words_folder_environment_files_and_process_group_of_its_own_and_the_modules_of_all(
    script, tmp_path
):
    """When a worker dies, Ray ends what is left of its process group: with one for all, every other worker."""
    (tmp_path / "here").mkdir()
    with fork_server(["colorsys"]):
        mine = {**os.environ, "MINE": "1"}
        said, parent, session = answer(
            script, env_vars={"OMP_NUM_THREADS": "3"}, cwd=tmp_path / "here", env=mine
        )
    words = [str(script), "--node=a"]
    assert said == [words, "__main__", "1", str(tmp_path / "here"), str(tmp_path), True, True]
    assert parent == session != os.getsid(0), "Ctrl-C is for the driver"


def test_what_a_library_may_read_when_it_is_imported_makes_a_fresh_interpreter(script):
    with fork_server(["colorsys"]):
        said, parent, session = answer(script, env_vars={"MINE": "2"})
    assert (said[2], said[-1]) == ("2", False)
    assert (parent, session) == (os.getpid(), os.getsid(0))


def test_without_the_server_workers_are_fresh(script):
    with fork_server(["colorsys"]):
        pid = answer(script)[1]
        os.kill(pid, signal.SIGKILL)
        said, parent, _ = answer(script)
        assert (said[-1], parent) == (False, os.getpid())
    assert not Path(f"/proc/{pid}").exists()
    assert ENVIRONMENT_VARIABLE not in os.environ


@pytest.mark.parametrize(
    "planted", ["import threading; threading.Thread(target=threading.Event().wait).start()", "1 / 0"]
)
def test_a_module_that_starts_a_thread_or_fails_makes_fresh_workers(
    script, tmp_path, planted, monkeypatch, capfd
):
    (tmp_path / "planted.py").write_text(planted)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with fork_server(["colorsys", "planted"]):
        assert answer(script)[0][-1] is False
    assert capfd.readouterr().err == ""


def test_whoever_started_a_worker_waits_for_it_however_it_ends(script):
    script.write_text("import os; print(os.getpid(), flush=True); import signal; signal.pause()")
    with fork_server([]), start(script) as worker:
        pid = int(worker.stdout.readline())
        assert pid != worker.pid
        os.kill(pid, signal.SIGKILL)
        assert worker.wait(TIMEOUT_S) == 0


def test_the_server_ends_with_the_process_that_started_it(script):
    code = """
import subprocess, sys
from offbeat_trainer.cluster.fork_server import fork_server
with fork_server([]):
    subprocess.run(sys.argv[1:], check=True)
    print(flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, start_worker.__file__, str(script), CONTEXT + "{}"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code, *command], text=True, **pipes) as driver:
        assert driver.stdout.readline()
        assert driver.stdout.readline() == "\n"
        driver.kill()
        server = int(driver.communicate()[1].split()[0])
    deadline = time.monotonic() + TIMEOUT_S
    while (
        Path(f"/proc/{server}").exists() and "\nState:\tZ" not in Path(f"/proc/{server}/status").read_text()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


ASKS = r"""
line = socket.socket(socket.AF_UNIX)
line.connect("\0" + sys.argv[1])
told = json.dumps([[sys.argv[2]], {}, "/"]).encode()
try:
    socket.send_fds(line, [len(told).to_bytes(8, "big")], [0, 1, 2])
    line.sendall(told)
    print(line.recv(1))
except OSError:
    print(b"")
"""


@AS_NOBODY
def test_another_user_gets_no_fork(script):
    script.chmod(0o644)
    with fork_server([]):
        assert run_stranger(ASKS, os.environ[ENVIRONMENT_VARIABLE], script) == "b''\n"
        assert answer(script)[0][1] == "__main__"


LISTENS = r"""
listener = socket.socket(socket.AF_UNIX)
listener.bind("\0" + sys.argv[1])
listener.listen(1)
print("ready", flush=True)
line, _ = listener.accept()
print(line.recv(10), flush=True)
"""


@AS_NOBODY
def test_a_worker_tells_its_environment_to_no_other_user(script):
    from strangers import _BEFORE

    name = f"offbeat-forks-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", _BEFORE + LISTENS, name], stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout.readline() == "ready\n"
        assert answer(script, env={**os.environ, ENVIRONMENT_VARIABLE: name})[0][-1] is False
        assert stranger.communicate(timeout=TIMEOUT_S)[0] == "b''\n"


def test_after_ctrl_c_it_is_waited_for_however_long_it_takes_to_end(monkeypatch):
    started, begin, wait = [], subprocess.Popen.__init__, subprocess.Popen._wait

    def noted(process, *words, **options):
        started.append(process)
        begin(process, *words, **options)

    def slowly(process, timeout):
        if timeout is not None and timeout < 1:  # what `with` gives it after Ctrl-C
            raise subprocess.TimeoutExpired(process.args, timeout)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "__init__", noted)
    monkeypatch.setattr(subprocess.Popen, "_wait", slowly)
    with pytest.raises(KeyboardInterrupt), fork_server([]):
        raise KeyboardInterrupt
    assert [process.returncode for process in started] == [-signal.SIGKILL]
