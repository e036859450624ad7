"""From settings to what the parts are told."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from offbeat_recipes.errors import SettingError
from offbeat_recipes.run.context import RunContext
from offbeat_recipes.run.folder import open_run_folder
from offbeat_recipes.run.modes import (
    cluster_spec,
    engine_on,
    make_rollout,
    replica_environments,
    threads_per_rank,
)
from offbeat_recipes.settings.reading import parse, to_dict
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import ArithmeticConfig
from offbeat_trainer import Grpo, GrpoConfig, StepShape
from offbeat_trainer.config import ClusterConfig
from offbeat_trainer.watch.jsonl import Silent
from offbeat_trainer.watch.watchdog import Timeline, Watchdog

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
CORES = 8


@pytest.fixture
def eight_cores(monkeypatch):
    """This process may use cores 3..10, as a batch scheduler would have it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3, 3 + CORES)))


@pytest.fixture
def folder(tmp_path):
    folder = open_run_folder(tmp_path / "run", to_dict(parse({})), resume=False)
    yield folder
    folder.close()


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("num_ranks", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (9, 1)])
def test_ranks_share_the_cores_they_are_allowed(num_ranks, threads):
    assert threads_per_rank(parse({"engine": {"num_ranks": num_ranks}})) == threads


@pytest.mark.usefixtures("eight_cores")
def test_threads_that_are_set_stay():
    assert threads_per_rank(parse({"engine": {"num_ranks": 2, "threads_per_rank": 7}})) == 7


@pytest.mark.usefixtures("eight_cores")
def test_on_a_cluster_threads_follow_the_machines_where_processes_come_to_be(folder):
    cluster = {"cluster": {"ray_address": "head:6379"}}
    apart = cluster_spec(parse({**cluster, "mode": {"name": "fully_async"}}), folder, "/m")
    assert (apart.train.threads_per_rank, apart.train.taken_cores) == (0, 1)
    assert not apart.rollout.shares_cores
    cluster["cluster"]["placement"] = "colocated"
    shared = cluster_spec(parse(cluster), folder, "/m")
    assert (shared.train.threads_per_rank, shared.train.taken_cores, shared.rollout.shares_cores) == (
        0,
        0,
        True,
    )
    told = cluster_spec(
        parse({**cluster, "engine": {"threads_per_rank": 3}, "rollout": {"cpu_threads": 2}}), folder, "/m"
    )
    assert (told.train.threads_per_rank, told.rollout.shares_cores) == (3, False)


def environments(num_replicas, ray_address="", **rollout):
    settings = {"name": "vllm", "num_replicas": num_replicas, **rollout}
    config = parse({"rollout": settings, "cluster": {"ray_address": ray_address}})
    return replica_environments(config, config.rollout_config("/m"))


@pytest.mark.usefixtures("eight_cores")
def test_replicas_have_cores_of_their_own_while_they_last():
    made = environments(3, tensor_parallel_size=2, cpu_threads=2)
    bindings = [environment[BINDING] for environment in made]
    assert bindings == ["3,4|5,6", "7,8|9,10", "3,4|5,6"]
    assert [environment["OMP_NUM_THREADS"] for environment in made] == ["2", "2", "2"]


@pytest.mark.usefixtures("eight_cores")
def test_replicas_on_a_cluster_are_not_bound_to_the_cores_of_the_driver():
    made = environments(2, ray_address="there:6379", tensor_parallel_size=2)
    assert [environment[BINDING] for environment in made] == ["nobind", "nobind"]


def test_every_replica_has_an_environment_of_its_own():
    made = environments(2)
    assert len(made) == 2
    assert made[0] is not made[1]
    assert made[0]["HF_HUB_OFFLINE"] == "1"


def test_the_replicas_of_this_machine_are_bound_to_cores_it_has():
    allowed = os.sched_getaffinity(0)
    for environment in environments(2, tensor_parallel_size=2):
        assert {int(core) for core in environment[BINDING].split("|")} <= allowed


def test_what_the_processes_are_told(folder, monkeypatch):
    monkeypatch.chdir(folder.path)
    config = parse(
        {
            "trainer": {"updates_per_step": 2, "keep_checkpoints": 5, "step_timeout_s": 33.0},
            "engine": {"num_ranks": 2, "threads_per_rank": 1},
            "rollout": {"name": "hf", "num_replicas": 3},
            "sampling": {"max_tokens": 21},
            "algorithm": {"kl_coef": 0.5},
            "cluster": {"health_timeout_s": 24.0},
        }
    )
    spec = cluster_spec(config, folder, "/m")
    train, rollout = spec.train, spec.rollout
    assert spec.cluster == ClusterConfig(health_timeout_s=24.0, health_period_s=2.0)
    assert (train.engine_name, train.device, train.num_ranks, train.threads_per_rank) == (
        "fsdp2",
        "cpu",
        2,
        1,
    )
    assert (train.keep_checkpoints, train.collective_timeout_s) == (5, 33.0)
    step = StepShape(group_size=16, updates_per_step=2, max_completion_tokens=21)
    assert train.algorithm == Grpo(config=GrpoConfig(kl_coef=0.5), step=step)
    assert (rollout.adapter_name, rollout.num_replicas, rollout.rollout.model_path) == ("hf", 3, "/m")
    assert len(rollout.environments) == 3
    assert (spec.step_timeout_s, spec.num_gpus) == (33.0, 0)
    # Other processes have other working directories.
    assert train.checkpoint_dir == str(folder.checkpoints.absolute())
    assert spec.log_dir == str(folder.logs.absolute())


def test_each_run_makes_a_secret_that_nobody_sets_and_nobody_reads(folder):
    config = parse({})
    one, other = (cluster_spec(config, folder, "/m") for _ in range(2))
    secret = one.train.sync.secret
    assert len(bytes.fromhex(secret)) == 32
    assert secret != other.train.sync.secret
    assert secret not in repr(one)
    with pytest.raises(
        SettingError, match=r"`sync\.secret` cannot be set: it follows from the run, which makes one"
    ):
        parse({"sync": {"secret": "mine"}})


def test_a_model_folder_holds_the_weights_to_start_from(tmp_path):
    config = parse({"model": {"random_init": True}, "engine": {"packing": False}})
    moved = engine_on(config, tmp_path)
    assert (moved.model.path, moved.model.random_init) == (str(tmp_path), False)
    assert (moved.packing, moved.optimizer) == (False, config.engine_config("").optimizer)


@pytest.mark.spawns
async def test_reward_processes_start_with_the_rollout_which_is_made_before_engines_load(folder, tmp_path):
    rows, rewards = tmp_path / "rows.jsonl", tmp_path / "rewards_of_wiring.py"
    rows.write_text('{"prompt": "1+1="}\n')
    rewards.write_text("def score(completion): return 1.0\n")
    model = make_task(ArithmeticConfig(), "", 0).model_folder(tmp_path / "base", 0)
    files = {
        "name": "file",
        "reward": f"{rewards}:score",
        "train_path": str(rows),
        "validation_path": str(rows),
    }
    config = parse({"task": files, "model": {"path": str(model)}})
    context = RunContext(
        config=config, folder=folder, task=make_task(config.task, str(model), 0), reporter=Silent(), jsonl=None,
        base_model=model, started=0.0,
    )  # fmt: skip

    async def complete(requests):
        raise AssertionError("nothing is generated")

    pool = SimpleNamespace(generate_many=complete, abort=None)
    rollout = make_rollout(context, SimpleNamespace(rollout=pool, timeline=Timeline(), watchdog=Watchdog()))
    try:
        assert "start of the rewards" in {task.get_name() for task in asyncio.all_tasks()}
        assert not (await rollout.scorer.start()).failure
    finally:
        await rollout.close()
