"""What a machine lacks is said before anything starts: real limits and network namespaces, and what a command says."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile

import pytest

from offbeat_recipes.planning.machine import OPEN_FILES, machine_refusals
from offbeat_recipes.settings.reading import parse

# What a command would refuse of the machine that it is on.
ASK = """
import sys
from offbeat_recipes.planning.machine import machine_refusals
from offbeat_recipes.settings.reading import parse
for refusal in machine_refusals(parse({})):
    print(refusal)
"""


def said(**cluster):
    return [str(one) for one in machine_refusals(parse({"cluster": cluster}))]


def told(*before, **more):
    done = subprocess.run(
        [*before, sys.executable, "-c", ASK], capture_output=True, text=True, timeout=600, check=True, **more
    )
    return done.stdout


def test_a_machine_as_it_should_be_is_taken():
    assert said() == said(rendezvous_host="127.0.0.1") == said(rendezvous_host="localhost") == []


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_to_meet_at_that_is_not_this_machine_is_refused_where_all_are_on_it(host):
    (refusal,) = said(rendezvous_host=host)
    assert refusal.startswith(f"cluster.rendezvous_host: {host} is no address of this machine")
    assert said(rendezvous_host=host, ray_address="head:6379") == []  # rank 0 may be there


@pytest.mark.spawns
def test_a_machine_without_loopback_is_refused():
    name = f"offbeat-alone-{os.getpid()}"
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name], check=False).returncode:
        pytest.skip("network namespaces need root and `ip`")
    try:
        assert "machine: it has no loopback: 127.0.0.1 cannot be reached" in told("ip", "netns", "exec", name)
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.spawns
def test_few_open_files_are_refused_where_no_more_are_to_be_had():
    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    assert f"a process may open 256 files; Ray, gloo and the replicas take more; raise the limit (ulimit -n {OPEN_FILES}" in told(
        preexec_fn=few
    )  # fmt: skip


def test_a_temporary_folder_whose_name_leaves_no_room_for_sockets_is_refused(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    (refusal,) = said()
    assert refusal.startswith(f"machine: the temporary folder {long} has a name of {len(str(long))} bytes")
    assert "TMPDIR=/tmp" in refusal


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensorbord", "no tracker named 'tensorbord' is installed; did you mean 'tensorboard'?"),
        ("nowhere", "name one of tensorboard, wandb, wandb_online, trackio, trajectories, or file.py:make"),
        ("tensorboard", ""),
        ("mine.py:make", ""),  # imported where it is called
    ],
)
def test_a_tracker_that_nobody_knows_is_refused_before_anything_starts(name, words):
    found = [str(one) for one in machine_refusals(parse({"report": {"trackers": [name]}}))]
    assert [words in one for one in found] == ([True] if words else [])


def test_a_tracker_whose_package_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("offbeat_recipes.planning.machine._TRACKERS", {"wandb": "no_such_package"})
    [refusal] = machine_refusals(parse({"report": {"trackers": ["wandb"]}}))
    assert str(refusal).startswith(
        "report.trackers: wandb needs the package no_such_package, which is not installed"
    )
