"""Whole runs on two hosts: Ray's head, the driver and the training rank on one, a replica on each, a link between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sync_faults.hosts import lacking, two_hosts

pytestmark = [pytest.mark.ray, pytest.mark.spawns, pytest.mark.slow, pytest.mark.deep]

# Of a host that Ray starts on: what the commands would set, for the processes that Ray starts.
RAY = """
import sys
from offbeat_recipes.cli._environment import prepare_environment
prepare_environment()
from ray.scripts.scripts import main
sys.argv = ["ray", "start", "--block", "--num-cpus=2", "--object-store-memory=134217728", *sys.argv[1:]]
main()
"""
TRAIN = "import sys; from offbeat_recipes.cli.train import main; sys.exit(main(sys.argv[1:]))"
PORT = 6379
WAIT_S = 600.0
CUT_S = 10.0
SMALL = (
    "task=arithmetic",
    "rollout=hf",
    "rollout.num_replicas=2",
    "warmup.steps=4",
    "trainer.prompts_per_step=4",
    "trainer.group_size=4",
    "trainer.validate_every=0",
    "report.trackers=[]",
)


class Run:
    """A run that a driver on the near host makes."""

    def __init__(self, hosts, name, *settings):
        near, far = hosts
        self.folder, self.far_folder = near.root / name, far.root / name
        words = [
            *SMALL,
            f"run_dir={near.root.parent / 'own' / name}",
            f"cluster.ray_address={near.address}:{PORT}",
        ]
        self.said = near.root / f"{name} said"
        with self.said.open("w") as said:
            self.driver = near.start(sys.executable, "-c", TRAIN, *words, *settings, stdout=said, stderr=said)

    @property
    def steps(self):
        """What was written of each step."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def log(self):
        """What the driver logged, and said."""
        path = self.folder / "logs" / "driver.log"
        return (path.read_text() if path.exists() else "") + self.said.read_text()

    def wait_for(self, met):
        deadline = time.monotonic() + WAIT_S
        while not met():
            assert self.driver.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def wait_for_more_steps(self, number):
        goal = len(self.steps) + number
        self.wait_for(lambda: len(self.steps) >= goal)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if why := lacking(tmp_path_factory.mktemp("trial")):
        pytest.skip(why)
    # `ray start` puts the path of its interpreter unquoted into commands of a shell, and a checkout may lie below a space.
    environment = tmp_path_factory.mktemp("environment") / "env"
    environment.symlink_to(sys.prefix)
    with two_hosts(tmp_path_factory.mktemp("two")) as (near, far):
        words = {
            near: ("--head", f"--port={PORT}", "--include-dashboard=false"),
            far: (f"--address={near.address}:{PORT}",),
        }
        for host, more in words.items():
            said = (host.root / "ray").open("w")
            with said:
                host.start(
                    str(environment / "bin" / "python"),
                    "-c",
                    RAY,
                    f"--node-ip-address={host.address}",
                    *more,
                    stdout=said,
                    stderr=said,
                )
            wait_for_text(host.root / "ray", "Ray runtime started")
        yield near, far


def wait_for_text(path, text):
    deadline = time.monotonic() + WAIT_S
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.1)


def replicas_on(host):
    """Return the process ids of the replicas on a host."""
    listed = subprocess.run(
        ["ip", "netns", "pids", host._namespace], capture_output=True, text=True, check=True
    )
    return [pid for pid in map(int, listed.stdout.split()) if b"ray::ReplicaWorker" in command_line(pid)]


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_whole_run_spreads_over_two_hosts(hosts):
    run = Run(hosts, "short", "trainer.steps=8")
    assert run.driver.wait(WAIT_S) == 0, run.log
    assert [step["sync/version"] for step in run.steps] == [*range(2, 10)]  # 1 is what warm-up left
    assert (run.folder / "final" / "config.json").exists()
    logs = [
        {path.name for path in (folder / "logs").glob("*.log")} for folder in (run.folder, run.far_folder)
    ]
    assert (logs[0] & logs[1], len(logs[1])) == (set(), 1), logs
    assert logs[0] | logs[1] == {"driver.log", "train_rank0.log", "replica0.log", "replica1.log"}
    assert [*(run.far_folder / "base").glob("*/config.json")], "the model was not brought"
    assert not (run.far_folder / "checkpoints").exists()


def test_a_run_on_two_hosts_learns_with_a_transport_that_nobody_chose(hosts):
    sizes = ("warmup.steps=400", "trainer.prompts_per_step=16", "trainer.group_size=8", "trainer.steps=40")
    run = Run(hosts, "learns", *sizes)
    assert run.driver.wait(WAIT_S) == 0, run.log
    rewards = [step["reward/mean"] for step in run.steps]
    assert sum(rewards[-10:]) > 1.2 * sum(rewards[:10]), rewards


def test_a_run_outlives_lost_replicas_and_a_cut_link(hosts):
    near, far = hosts
    run = Run(hosts, "long", "trainer.steps=1000000", "trainer.save_every=100000")
    run.wait_for_more_steps(2)
    for host in (far, near):  # the second only when the first is back: then the replacement alone serves
        (lost,) = replicas_on(host)
        os.kill(lost, signal.SIGKILL)
        run.wait_for(lambda host=host, lost=lost: replicas_on(host) not in ([], [lost]))
        run.wait_for(lambda host=host: f"on {host.address}" in run.log)
        run.wait_for_more_steps(3)

    near.cut()
    time.sleep(CUT_S)
    near.mend()
    run.wait_for_more_steps(3)
    assert (len(replicas_on(near)), len(replicas_on(far))) == (1, 1)
    run.driver.send_signal(signal.SIGINT)
    assert run.driver.wait(WAIT_S) == 130, run.log


def test_loopback_is_refused_at_the_first_sync_with_the_remedy(hosts):
    _, far = hosts
    run = Run(hosts, "loopback", "trainer.steps=2", "cluster.rendezvous_host=127.0.0.1")
    assert run.driver.wait(WAIT_S) == 1, run.log
    assert "cluster.rendezvous_host=127.0.0.1 is loopback, but replica" in run.log
    assert f"is on another machine ({far.address}; training rank 0 is on" in run.log


def test_a_run_outlives_a_lost_host_and_goes_on_later_with_those_that_are_left(hosts):
    near, far = hosts  # the last test: nothing is left of the far one
    run = Run(hosts, "lost", "trainer.steps=1000000", "trainer.save_every=2")
    run.wait_for_more_steps(2)
    assert (len(replicas_on(near)), len(replicas_on(far))) == (1, 1)
    far.kill()
    run.wait_for(lambda: " is lost (" in run.log)
    run.wait_for(lambda: len(replicas_on(near)) == 2)  # where Ray has room
    run.wait_for_more_steps(3)
    run.driver.send_signal(signal.SIGINT)
    assert run.driver.wait(WAIT_S) == 130, run.log

    steps = len(run.steps)
    fewer = ("trainer.steps=" + str(steps + 2), "rollout.num_replicas=1", "resume=auto")
    run = Run(hosts, "lost", *fewer)
    assert run.driver.wait(WAIT_S) == 0, run.log
    assert [step["step"] for step in run.steps] == [*range(1, steps + 3)]
