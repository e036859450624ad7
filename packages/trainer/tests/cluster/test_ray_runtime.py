"""An address that is no Ray's is told at once, or after the half minute that Ray's own client takes; Ctrl-Z stops no Ray.

A private Ray starts its workers whatever the path of the environment holds.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from offbeat_trainer.cluster.fork_server import ENVIRONMENT_VARIABLE
from offbeat_trainer.config import ClusterConfig
from offbeat_trainer.errors import TrainerError


@pytest.fixture
def refused():
    from offbeat_trainer.cluster.ray_runtime import start_ray

    def refused(address):
        with pytest.raises(TrainerError, match=r"check cluster\.ray_address") as caught:
            start_ray(ClusterConfig(ray_address=address), num_gpus=0)
        return str(caught.value)

    return refused


@pytest.mark.spawns
def test_a_port_at_which_nobody_listens(refused):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "nobody is there" in refused(f"127.0.0.1:{port}")
    assert "nobody is there" in refused("no-such-host.invalid:6379")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("silent", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_somebody_who_does_not_speak_as_ray_does(refused, silent):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                connection.close()

        if not silent:
            threading.Thread(target=hang_up, daemon=True).start()
        said = refused(f"127.0.0.1:{server.getsockname()[1]}")
        server.shutdown(socket.SHUT_RDWR)
    assert "does not answer as Ray does" in said


# On a busy machine a killed server takes longer than the second that Ray waits for it, if it is not asked to wait.
DRIVER = """
import subprocess
import sys
import ray
from offbeat_trainer.cluster.ray_runtime import start_ray, stop_ray
from offbeat_trainer.cluster.fork_server import ENVIRONMENT_VARIABLE
from offbeat_trainer.config import ClusterConfig

wait = subprocess.Popen.wait

def wait_on_a_busy_machine(process, timeout=None):
    if timeout == 1:
        raise subprocess.TimeoutExpired(process.args, timeout)
    return wait(process, timeout)

subprocess.Popen.wait = wait_on_a_busy_machine
start_ray(ClusterConfig(object_store_mib=100), num_gpus=0)
print("started", flush=True)
sys.stdin.readline()
print(ray.get(ray.remote(lambda: "answered").remote()), flush=True)
stop_ray()
"""


def processes_of(group):
    """Return the state of each process of a process group, by its id."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, of_group = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(of_group) == group:
            found[int(pid)] = state
    return found


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.spawns
def test_ctrl_z_stops_the_driver_and_not_ray():
    driver = subprocess.Popen(
        [sys.executable, "-W", "always::ResourceWarning", "-c", DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert driver.stdout.readline() == "started\n"
        before = processes_of(driver.pid)
        assert len(before) >= 3, "Ray's servers are of the driver's group"
        started = "\n".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in before)
        assert "raylet" in started
        assert not [name for name in ("monitor.py", "dashboard.py") if name in started], "of no use to a run"
        os.killpg(driver.pid, signal.SIGTSTP)  # as a terminal does
        deadline = time.monotonic() + 600
        while processes_of(driver.pid).get(driver.pid) != "T":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        stopped = [pid for pid, state in processes_of(driver.pid).items() if state == "T"]
        assert stopped == [driver.pid]
        os.killpg(driver.pid, signal.SIGCONT)
        said, warned = driver.communicate("go on\n", timeout=600)
        assert (said, driver.returncode) == ("answered\n", 0)
        assert "still running" not in warned
    finally:
        driver.kill()
        driver.wait()


ASKER = """
import sys
from contextlib import nullcontext
import ray
from offbeat_trainer.cluster.fork_server import fork_server
from offbeat_trainer.cluster.ray_runtime import start_ray, stop_ray
from offbeat_trainer.cluster.fork_server import ENVIRONMENT_VARIABLE
from offbeat_trainer.config import ClusterConfig

with SERVER:
    start_ray(ClusterConfig(object_store_mib=100), num_gpus=0)
    look = ray.remote(lambda: (sys.executable, "colorsys" in sys.modules))
    print(*ray.get(look.remote(), timeout=300))
    print(*ray.get(look.options(runtime_env={"env_vars": {"ANY": "a b"}}).remote(), timeout=300))
    stop_ray()
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.spawns
@pytest.mark.parametrize(
    ("server", "forked"), [("nullcontext()", False), ("fork_server(['colorsys'])", True)]
)
def test_workers_start_whatever_the_path_of_the_environment_holds(tmp_path, server, forked):
    environment = tmp_path / "a folder, für $HOME & more"
    environment.symlink_to(sys.prefix)
    python = str(environment / "bin" / "python")
    alone = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    code = ASKER.replace("SERVER", server)
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, env=alone)
    assert (ran.returncode, ran.stdout) == (0, f"{python} {forked}\n{python} False\n"), ran.stderr
