"""Where processes go: separate pools, or the same devices in turns."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.planning.algorithm import offloads, recomputes, sleeps
from offbeat_recipes.planning.facts import Facts, ModelFacts
from offbeat_recipes.planning.memory import Memory
from offbeat_recipes.planning.placement import default_threads, gpu_peak
from offbeat_recipes.planning.plan import plan_run
from offbeat_recipes.run.modes import engine_on, replica_environments
from offbeat_trainer.config import Placement

COLOCATED = "cluster.placement=colocated"
MODEL = ModelFacts(
    num_params=1_000_000,
    num_layers=2,
    hidden_size=64,
    vocab_size=32,
    num_kv_heads=2,
    head_dim=32,
    max_positions=256,
)
CPU = Facts(
    num_cores=2,
    num_gpus=0,
    gpu_gib=0,
    ram_gib=16,
    model=MODEL,
    max_prompt_tokens=6,
    num_train_prompts=1000,
    longest_answer_tokens=24,
    recomputes=True,
)
GPUS = replace(CPU, num_cores=16, num_gpus=4, gpu_gib=80, ram_gib=512, offloads=True, sleeps=True)


def refused(*settings: str, facts: Facts = CPU) -> list[str]:
    return [item.setting for item in plan_run(compose_run(settings), facts).refusals]


def memory(certain: int, maybe: int) -> Memory:
    items = (("weights", certain), ("activations", maybe))
    return Memory(process="p", num=1, items=items, certain=certain)


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_who_runs_at_the_same_time_cannot_share_devices(mode: str):
    (refusal,) = plan_run(compose_run([COLOCATED, f"mode={mode}"]), CPU).refusals
    assert refusal.setting == "cluster.placement"
    assert f"mode={mode} runs them at the same time" in refusal.reason
    assert refusal.remedy == "mode=sync, or cluster.placement=separate"
    assert refused(COLOCATED) == []


@pytest.mark.parametrize(
    ("settings", "apart", "shared"),
    [
        (["engine.num_ranks=4", "rollout.num_replicas=4"], ["engine.num_ranks"], []),
        (["engine.num_ranks=4", "rollout.num_replicas=2", "rollout.tensor_parallel_size=2"], ["engine.num_ranks"], []),
        (["engine.num_ranks=4"], ["engine.num_ranks"], []),
        (["engine.num_ranks=5"], ["engine.num_ranks"], ["engine.num_ranks"]),
        (["engine.num_ranks=2", "rollout.num_replicas=3"], ["engine.num_ranks"], ["rollout.num_replicas"]),
        (["sync=broadcast"], [], ["sync.transport"]),
        (["sync=auto"], [], []),
        (["sync=disk"], [], []),
    ],
)  # fmt: skip
def test_shared_gpus_count_once(settings: list[str], apart: list[str], shared: list[str]):
    assert refused("device=cuda", *settings, facts=GPUS) == apart
    assert refused("device=cuda", COLOCATED, *settings, facts=GPUS) == shared


@pytest.mark.parametrize(
    ("slept", "offloaded", "peak"),
    [(True, True, 13), (True, False, 20), (False, True, 23), (False, False, 23)],
)
def test_memory_of_a_shared_gpu_is_added_up_where_somebody_stays(slept: bool, offloaded: bool, peak: int):
    facts = replace(GPUS, sleeps=slept, offloads=offloaded)
    rank, replica = memory(7, 3), memory(9, 4)
    shared = compose_run(["device=cuda", COLOCATED])
    assert gpu_peak(shared, facts, rank, replica, certain=False) == peak
    assert gpu_peak(compose_run(["device=cuda"]), facts, rank, replica, certain=False) == 13
    assert gpu_peak(shared, facts, rank, replica, certain=True) == (9 if slept and offloaded else 16)


def test_a_shared_gpu_that_cannot_hold_both_is_refused_where_one_of_them_stays():
    settings = ["device=cuda", COLOCATED, "rollout.gpu_memory_fraction=0.9"]
    large = replace(GPUS, model=replace(MODEL, num_params=2_000_000_000))
    assert refused(*settings, facts=large) == []
    for stays in ("offloads", "sleeps"):
        plan = plan_run(compose_run(settings), replace(large, **{stays: False}))
        (refusal,) = plan.refusals
        assert refusal.setting == "cluster.placement"
        assert "keeps its memory while the other works" in refusal.reason
        assert ("fsdp2" if stays == "offloads" else "vllm") in refusal.reason
    assert refused(*settings, facts=replace(large, ram_gib=16)) == ["cluster.placement"]


def test_on_a_cpu_both_sides_have_all_cores_in_turns():
    shared = compose_run([COLOCATED])
    assert (default_threads(shared, 8), shared.replica_threads(8)) == (8, 8)
    two = compose_run([COLOCATED, "rollout.num_replicas=2", "engine.num_ranks=2"])
    assert (default_threads(two, 8), two.replica_threads(8)) == (4, 4)
    assert compose_run([COLOCATED, "rollout.cpu_threads=3"]).replica_threads(8) == 3
    assert compose_run([]).replica_threads(8) == 1, "apart, a replica has one core unless told otherwise"
    assert default_threads(compose_run(["mode=fully_async"]), 8) == 7
    assert shared.rollout_config("/m", 8).cpu_threads == 8
    cores = len(os.sched_getaffinity(0))
    rollout = shared.rollout_config("/m", cores)
    assert replica_environments(shared, rollout)[0]["OMP_NUM_THREADS"] == str(cores)
    shared = compose_run([COLOCATED, "engine.threads_per_rank=0"])
    where = {item.process: item.where for item in plan_run(shared, CPU).placement}
    assert where["replica 0 (vllm)"] == "2 of 2 cores, in turns with training"
    assert where["training rank 0 (fsdp2)"] == "2 thread(s) on 2 cores"


def test_placement_on_shared_gpus_names_whose_they_are():
    plan = plan_run(
        compose_run(
            ["device=cuda", COLOCATED, "engine.num_ranks=4", "rollout.num_replicas=2", "rollout.tensor_parallel_size=2"]
        ),
        GPUS,
    )  # fmt: skip
    assert plan.placement[-1].where == "the GPU(s) of ranks 2 to 3, in turns"


def test_the_transport_follows_where_processes_are_unless_it_is_named():
    assert compose_run([]).sync_config().transport == "auto"
    assert compose_run(["sync=broadcast"]).sync_config().transport == "broadcast"
    assert compose_run([COLOCATED]).sync_config().transport == "auto"
    assert compose_run([COLOCATED, "sync=disk"]).sync_config().transport == "disk"


def test_on_shared_gpus_the_engine_leaves_its_memory_between_updates():
    def away(*settings: str) -> tuple[bool, bool]:
        engine = engine_on(compose_run(settings), Path("/m"))
        return engine.offload_parameters, engine.offload_optimizer

    assert away("device=cuda", COLOCATED) == (True, True)
    assert away("device=cuda") == away(COLOCATED) == (False, False)


def test_what_the_parts_declare():
    vllm, hf = compose_run(["device=cuda"]), compose_run(["device=cuda", "rollout=hf"])
    assert offloads(vllm)
    assert sleeps(vllm)
    assert sleeps(hf)
    assert not sleeps(compose_run([]))
    assert recomputes(vllm)
    assert recomputes(hf)


def test_keys_and_values_are_kept_or_recomputed_as_replicas_can():
    def keep(*settings: str, facts: Facts = CPU) -> list[str]:
        return refused("mode=fully_async", *settings, facts=facts)

    unable = replace(CPU, recomputes=False)
    assert keep() == keep("mode.partial=recompute") == keep(facts=unable) == []
    assert keep("mode.partial=recompute", facts=unable) == ["mode.partial"]
    assert keep("rollout.prefix_caching=true") == []


def test_placement_is_separate_unless_asked_otherwise():
    assert compose_run([]).cluster.placement is Placement.SEPARATE
