"""Benches in tools/bench that start neither Ray nor a generation engine: the whole path of each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench_runs import DEEP, MARKS, assert_published, bench

pytestmark = MARKS


def test_the_engine_beside_plain_loops():
    answer = bench("engine", "--json", "--smallest")
    assert_published(answer, "engine")
    assert_published(answer, "engine_memory")
    assert answer["offload_ok"] is True
    assert 0 < answer["mean_over_max_length"] < 1
    assert answer["checkpoint_mib"] > answer["load_files_mib"] > 0


@pytest.mark.slow
def test_the_megatron_engine_beside_a_bare_loop():
    answer = bench("engine", "--json", "--smallest", "--engine", "megatron")
    assert_published(answer, "megatron")
    assert {"load_peak_ratio", "engine_export_peak_ratio"} <= answer.keys()


def test_modes_without_processes_of_a_run():
    answer = bench("modes", "--json", "--smallest", "--only", "paced,driver,rewards")
    for part in ("paced", "driver", "rewards"):
        assert_published(answer, part)
    assert (answer["samples"], answer["tokens"]) == (2 * 250 * 8, 4 * 8 * 8192)


def test_syncs_of_each_transport():
    answer = bench("sync", "--json", "--smallest", "--only", "shm,shm_adopted,broadcast,disk,bound")
    assert answer["shm"]["24 tensors"].keys() == {"1", "4"}
    for transport in ("shm_adopted", "broadcast", "disk"):
        assert answer[transport]["24 tensors"].keys() == {"1"}
    assert_published(answer, "sync", but="_400")


@pytest.mark.parametrize(
    "carrier", ["sockets", pytest.param("ray", marks=(pytest.mark.ray, pytest.mark.slow, DEEP))]
)
def test_a_sender_and_a_receiver_are_killed(carrier):
    answer = bench("sync_chaos", "--json", "--kills", "2", "--transport", "shm", "--carrier", carrier)
    counts = {
        name: answer[name] for name in ("kills", "killed_receivers", "lost", "corrupt", "stuck", "good_syncs")
    }
    assert counts == {
        "kills": 2, "killed_receivers": 1, "lost": 0, "corrupt": 0, "stuck": 0, "good_syncs": 3,
    }  # fmt: skip
    assert_published(answer, "sync_chaos")


def test_episodes_of_many_turns():
    answer = bench("episodes", "--json", "--smallest")
    assert_published(answer, "episodes")
    for way in ("harness", "environment"):
        found = answer[way]
        assert found["full_speed"]["turns_per_s"] > 0
        assert 0 < found["read_per_turn"] < found["sent_per_turn"] / 5, (
            "what was said before is not read again"
        )
        assert found["read_last_over_first"] == 1, "a turn costs as much as what is new in it"
