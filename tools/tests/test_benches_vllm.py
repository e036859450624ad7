"""Benches that start vLLM or SGLang: the whole path of each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench_runs import DEEP, MARKS, assert_published, bench

pytestmark = MARKS


@pytest.mark.vllm
@pytest.mark.slow
def test_syncs_into_vllm_and_by_its_own_cycle():
    answer = bench("sync", "--json", "--smallest", "--only", "vllm,small")
    assert_published(answer, "sync_vllm")
    for side in answer["vllm"]["sides"].values():
        assert side["tokens"] >= side["requests"] == 8


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("part", ["vllm", pytest.param("sglang,seeds", marks=(pytest.mark.sglang, DEEP))])
def test_adapters_beside_bare_engines(part):
    answer = bench("rollout", "--json", "--pairs", "1", "--requests", "2", "--tokens", "4", "--only", part)
    assert answer["engines"].keys() == set(part.split(","))
    assert_published(answer, f"rollout_{part.partition(',')[0]}")
    assert all(len(engine["ratios"]) == 1 for engine in answer["engines"].values())
