"""A source and a replica on hosts of their own: other loopback, other /dev/shm, a link that is cut. No Ray."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offbeat_ckptsync.testing import awkward_weights, prints_of
from sync_faults.hosts import lacking, two_hosts

pytestmark = pytest.mark.spawns

ENDS = str(Path(__file__).with_name("far_ends.py"))
WAIT_S = 300.0


class End:
    """A process of `far_ends` on one of the hosts."""

    def __init__(self, host, *words):
        self.process = host.start(sys.executable, ENDS, *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def told(self, wait_s=WAIT_S):
        ready, _, _ = select.select([self.process.stdout], [], [], wait_s)
        assert ready, f"nothing was said for {wait_s:g} s"
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(WAIT_S)}"
        return json.loads(line)

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.told()


@pytest.fixture(scope="module")
def _possible(tmp_path_factory):
    if why := lacking(tmp_path_factory.mktemp("trial")):
        pytest.skip(why)


@pytest.fixture
def hosts(_possible, tmp_path):
    with two_hosts(tmp_path) as both:
        yield both


def joined(hosts, source_host=None):
    near, far = hosts
    source = End(near, "near", near.address, source_host or near.address)
    port = source.told()["port"]
    replica = End(far, "far", far.address, near.address, str(port))
    assert replica.told() == {"joined": True}
    assert source.ask("wait", WAIT_S) == {"members": ["far"]}
    return source, replica


def synced_until_well(source, version):
    """Sync until it succeeds: a link that came up again is found by the next packet that is sent once more."""
    deadline = time.monotonic() + WAIT_S
    while "error" in (told := source.ask("sync", version)):
        assert time.monotonic() < deadline, told
        source.ask("wait", WAIT_S)
    return told


def test_weights_cross_and_a_cut_link_is_named_and_heals(hosts):
    near, _ = hosts
    source, replica = joined(hosts)
    told = source.ask("sync", 1)
    assert told["members"] == ["far"]
    assert told["transport"] == "broadcast"
    assert "rank 0 of far is on another machine (far; the source is on near)" in told["why"]
    assert replica.ask("status") == {"version": 1, "committed": True, "prints": prints_of(awkward_weights(1))}
    near.cut()
    told = source.ask("sync", 2)
    assert "far" in told["error"]
    assert replica.ask("status")["prints"] == prints_of(awkward_weights(1))
    near.mend()
    assert synced_until_well(source, 3)["members"] == ["far"]
    assert replica.ask("status") == {"version": 3, "committed": True, "prints": prints_of(awkward_weights(3))}


@pytest.mark.deep
def test_a_machine_that_is_lost_between_syncs_is_noticed_on_both_sides(hosts):
    near, _ = hosts
    source, replica = joined(hosts)
    near.cut()
    deadline = time.monotonic() + WAIT_S
    while replica.ask("managed")["managed"]:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    while "error" not in (told := source.ask("wait", 0.5)):
        assert time.monotonic() < deadline
    assert "missing after 0.5 s: far" in told["error"]
    near.mend()
    assert source.ask("wait", WAIT_S) == {"members": ["far"]}
    assert source.ask("sync", 1)["members"] == ["far"]


def test_a_source_on_loopback_is_refused_with_the_remedy(hosts):
    source, _ = joined(hosts, source_host="127.0.0.1")
    error = source.ask("sync", 1)["error"]
    assert (
        "the source listens on loopback, but rank 0 of far is on another machine (far; the source is on near)"
        in error
    )
    assert "let `host` of the source's settings" in error
