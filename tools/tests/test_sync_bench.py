"""What `tools/bench/sync.py` measures with: the machine's limits, and real syncs between processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import xxhash

from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.toolkit.config import SyncConfig

pytestmark = pytest.mark.spawns


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))


@pytest.fixture
def links(bench):
    return import_module("links")


@pytest.fixture
def timed_syncs(bench):
    return import_module("timed_syncs")


def test_weights_have_the_size_and_number_asked_for_and_change_everywhere():
    weights = import_module("timed_weights").Weights(4 << 20, 40)
    tensors = [parameter.clone() for parameter in weights.parameters()]
    assert len(tensors) == 40
    assert sum(tensor.numel() * 2 for tensor in tensors) == pytest.approx(4 << 20, rel=0.02)
    before = weights.fingerprint()
    weights.change()
    assert weights.fingerprint() != before


def test_limits_are_rates(links):
    assert 0.05 < links.memcpy(1 << 20) < 1000
    assert 0.05 < links.libc_memcpy(1 << 20) < 1000
    rates = links.raw_gloo(1 << 20)
    assert set(rates) == set(links.GLOO_CALLS)
    assert all(0.001 < rate < 1000 for rate in rates.values())


def test_a_plain_file_is_measured_and_removed(links, tmp_path):
    assert 0.001 < links.disk(1 << 20, str(tmp_path)) < 1000
    assert list(tmp_path.iterdir()) == []


def test_syncs_between_processes_are_timed_and_checked(timed_syncs):
    load = timed_syncs.Load(num_bytes=1 << 20, num_tensors=20, num_receivers=2, num_syncs=2)
    reports = timed_syncs.measure_apart(load, SyncConfig(transport="shm", bucket_mib=0.125))
    assert [report.version for report in reports] == [1, 2, 3]
    assert {report.num_members for report in reports} == {2}
    assert all(report.num_buckets >= 8 for report in reports)


def test_what_fails_in_the_measuring_process_is_told(timed_syncs):
    load = timed_syncs.Load(num_bytes=1 << 20, num_tensors=20, num_receivers=1, num_syncs=1)
    with pytest.raises(TransferError, match=r"syncs over disk: .*disk_path"):
        timed_syncs.measure_apart(load, SyncConfig(transport="disk"))


def test_the_bound_is_measured(bench, tmp_path):
    bound, out = import_module("bound"), tmp_path / "bound.json"
    done = subprocess.run([sys.executable, bound.__file__, "65", str(out)], timeout=600, check=False)
    assert done.returncode == 0
    figures = json.loads(out.read_text())
    assert 0 < figures["seconds_unverified"] < 600
    assert 0 < figures["seconds"] < 600


def test_the_bound_finds_a_bucket_that_is_not_what_was_sent(bench):
    bound = import_module("bound")
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shared = np.zeros(bound.BUCKET + 5, dtype=np.uint8)
    with near, far:
        receiver = threading.Thread(target=bound.receive, args=(far, shared))
        receiver.start()
        for spoilt, answer in ((False, b"loaded"), (True, b"other")):
            for start in (0, bound.BUCKET):
                proof = xxhash.xxh3_128_digest(shared[start : start + bound.BUCKET].data)
                shared[-1] ^= spoilt and start > 0
                near.send(start.to_bytes(8) + proof)
            assert near.recv(8) == answer
        near.close()
        receiver.join(60)
    assert not receiver.is_alive()
