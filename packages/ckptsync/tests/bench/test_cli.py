from __future__ import annotations

import json

import pytest

from offbeat_ckptsync.bench import links
from offbeat_ckptsync.bench.cli import Link, main
from offbeat_ckptsync.bench.syncs import Load, measure_apart
from offbeat_ckptsync.bench.workload import Weights
from offbeat_ckptsync.config import SyncConfig
from offbeat_ckptsync.errors import TransferError

pytestmark = pytest.mark.spawns


def test_weights_have_the_size_and_number_asked_for_and_change_everywhere():
    weights = Weights(4 << 20, 40)
    tensors = [parameter.clone() for parameter in weights.parameters()]
    assert len(tensors) == 40
    assert sum(tensor.numel() * 2 for tensor in tensors) == pytest.approx(4 << 20, rel=0.02)
    before = weights.fingerprint()
    weights.change()
    assert weights.fingerprint() != before


def test_limits_are_rates():
    assert 0.05 < links.memcpy(1 << 20) < 1000
    rates = links.raw_gloo(1 << 20)
    assert set(rates) == set(links.GLOO_CALLS)
    assert all(0.001 < rate < 1000 for rate in rates.values())


def test_a_plain_file_is_measured_and_removed(tmp_path):
    assert 0.001 < links.disk(1 << 20, str(tmp_path)) < 1000
    assert list(tmp_path.iterdir()) == []


def test_an_estimate_is_the_fixed_part_and_bytes_at_the_measured_rate():
    link = Link(transport="shm", limit_gb_per_s=5.0, num_bytes=10**9, seconds=0.6, fixed_s=0.1)
    assert link.estimate_s(0) == pytest.approx(0.1)
    assert link.estimate_s(1e9) == pytest.approx(0.6)
    assert link.estimate_s(4e9) == pytest.approx(2.1)


def test_syncs_between_processes_are_timed_and_checked():
    load = Load(num_bytes=1 << 20, num_tensors=20, num_receivers=2, num_syncs=2)
    reports = measure_apart(load, SyncConfig(transport="shm", bucket_mib=0.125))
    assert [report.version for report in reports] == [1, 2, 3]
    assert {report.num_members for report in reports} == {2}
    assert all(report.num_buckets >= 8 for report in reports)


def test_what_fails_in_the_measuring_process_is_told():
    load = Load(num_bytes=1 << 20, num_tensors=20, num_receivers=1, num_syncs=1)
    with pytest.raises(TransferError, match=r"syncs over disk: .*disk_path"):
        measure_apart(load, SyncConfig(transport="disk"))


@pytest.mark.deep
def test_the_command_prints_what_a_model_will_take(capsys, tmp_path):
    line = [
        "--mib",
        "1",
        "--tensors",
        "20",
        "--transports",
        "disk",
        "--disk-path",
        str(tmp_path),
        "--models",
        "2",
    ]
    assert main([*line, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["disk"]
    assert answer["estimate_s"]["2"] >= answer["fixed_s"] > 0
    assert answer["fraction_of_limit"] == pytest.approx(answer["gb_per_s"] / answer["limit_gb_per_s"])
    assert list(tmp_path.iterdir()) == []
