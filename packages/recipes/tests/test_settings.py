"""The tree of settings, its reading, and the sentences for what is wrong."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest

from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_engine.config import Dtype, OptimizerConfig
from offbeat_engine.fsdp2.config import Fsdp2Config
from offbeat_engine.interface import engine_names
from offbeat_recipes.errors import SettingError
from offbeat_recipes.settings.reading import all_settings, known_paths, parse, suggestion, to_dict
from offbeat_recipes.settings.tree import (
    EngineSection,
    EnvironmentChoice,
    ModeConfig,
    ModelSection,
    RolloutSection,
    RunConfig,
)
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.registry import task_names
from offbeat_rollout.toolkit.registry import adapter_names
from offbeat_rollout.vllm.config import VllmConfig
from offbeat_trainer.algorithms.registry import algorithm_names
from offbeat_trainer.config import OnFailure


def _problems(raw: dict[str, Any]) -> str:
    with pytest.raises(SettingError) as caught:
        parse(raw)
    return str(caught.value)


def test_defaults_validate_and_come_back_the_same():
    config = parse({})
    assert isinstance(config, RunConfig)
    assert config == parse({"name": "arithmetic"})
    assert parse(to_dict(config)) == config


def names(union: object) -> list[str]:
    """Return the names of the variants of a section."""
    return [str(get_args(get_type_hints(one)["name"])[0]) for one in get_args(get_args(union)[0])]


@pytest.mark.parametrize("mode", names(ModeConfig))
@pytest.mark.parametrize("environment", names(EnvironmentChoice))
@pytest.mark.parametrize("algorithm", algorithm_names())
def test_every_run_has_fewer_than_140_settings(mode, environment, algorithm):
    assert len(task_names()) >= 5
    for task, rollout, engine in itertools.product(task_names(), adapter_names(), engine_names()):
        chosen = {"task": task, "rollout": rollout, "engine": engine}
        known = known_paths({**chosen, "mode": mode, "environment": environment, "algorithm": algorithm})
        assert 60 < len(known) < 140, chosen


def test_what_belongs_together_follows_from_one_setting():
    config = parse({"sync": {"transfer_timeout_s": 100.0}, "trainer": {"step_timeout_s": 700.0}})
    sync = config.sync_config()
    assert (sync.begin_timeout_s, sync.verify_timeout_s, sync.commit_timeout_s) == (10.0, 10.0, 10.0)
    assert (sync.transfer_timeout_s, sync.flip_timeout_s) == (100.0, 20.0)
    assert parse({}).sync_config() == replace(
        SyncConfig(transport="auto"), disk_path=parse({}).sync_config().disk_path
    )
    assert config.rollout_config("/m").start_timeout_s == 700.0
    short = parse({"trainer": {"step_timeout_s": 10.0}})
    engine = short.engine_config("/m")
    assert (engine.collective_timeout_s, engine.checkpoint_timeout_s) == (10.0, 60.0)
    assert short.rollout_config("/m").request_timeout_s == 600.0, "slow is not lost"
    assert short.rollout_config("/m").start_timeout_s == 300.0
    reward = {"timeout_s": 5.0, "max_attempts": 4, "on_failure": "stop", "concurrency": 1}
    turns = parse({"reward": reward, "environment": {"path": "a.py:B"}}).turns
    assert (turns.timeout_s, turns.max_attempts, turns.on_failure) == (5.0, 4, OnFailure.STOP)
    assert turns.concurrency == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"max_turns": 3},
            "`environment.max_turns` is for runs with an environment; `environment.path` names one",
        ),
        (
            {"path": "a:b", "name": "own"},
            "`environment.name` cannot be set: it follows from environment.path",
        ),
        ({"path": "a:b", "max_turns": 0}, "`environment.max_turns`: expected at least 1, got 0"),
        (
            {"path": "a:b", "reward_from": "me"},
            "`environment.reward_from`: expected 'environment', 'task' or 'both'",
        ),
        (3, "`environment`: expected a section with keys of its own, got 3"),
    ],
)
def test_an_environment_has_settings_once_it_has_a_path(given, words):
    assert words in _problems({"environment": given})


def test_a_path_is_an_environment_and_comes_back_the_same():
    assert parse({}).turns is None
    config = parse({"environment": {"path": "a.py:B", "max_tokens": 7}})
    assert config.turns is not None
    assert (config.turns.max_tokens, config.max_new_tokens) == (7, 7)
    assert parse(to_dict(config)) == config


def test_one_precision_and_one_device_for_all():
    config = parse({"model": {"dtype": "bfloat16", "random_init": True}, "device": "cuda", "seed": 3})
    engine, rollout = config.engine_config("/m"), config.rollout_config("/m")
    assert type(engine) is Fsdp2Config
    assert type(rollout) is VllmConfig
    assert (engine.dtype, rollout.dtype) == (Dtype.BFLOAT16, "bfloat16")
    assert (engine.device, rollout.device) == ("cuda", "cuda")
    assert (engine.model.path, engine.model.seed, engine.model.random_init) == ("/m", 3, True)
    assert rollout.model_path == "/m"


def test_sections_hand_on_every_field_of_the_package():
    config = parse({"engine": {"optimizer": {"lr": 0.5}, "packing": False}, "rollout": {"max_num_seqs": 7}})
    assert config.engine_config("m").optimizer == OptimizerConfig(lr=0.5, total_steps=100)
    assert config.engine_config("m").packing is False
    assert config.rollout_config("m").max_num_seqs == 7


def test_what_follows_from_other_settings():
    config = parse({"name": "x", "trainer": {"steps": 7, "updates_per_step": 3}, "device": "cuda"})
    assert config.engine_config("m").optimizer.total_steps == 21
    assert str(config.folder) == "runs/x"
    assert (config.sync_config().device, config.sync_config().host) == ("cuda", "127.0.0.1")
    assert config.sync_config().disk_path.endswith("runs/x/sync")
    assert config.sync_config().silent == "fence"
    assert str(parse({"run_dir": "/r"}).folder) == "/r"


@pytest.mark.parametrize("section", [EngineSection, RolloutSection, ModelSection])
def test_derived_fields_say_what_decides_them(section: type):
    derived = [item for item in dataclasses.fields(section) if "derived" in item.metadata]
    assert derived
    assert set(get_type_hints(section)) >= {item.name for item in derived}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"trainer": {"stpes": 5}}, "unknown setting `trainer.stpes`; did you mean `trainer.steps`?"),
        ({"trianer": {"steps": 5}}, "unknown setting `trianer.steps`; did you mean `trainer.steps`?"),
        ({"steps": 5}, "did you mean `trainer.steps`?"),
        ({"zzz": 5}, "unknown setting `zzz`; see --cfg job"),
        ({"trainer": {"steps": "five"}}, "`trainer.steps`: expected a whole number, got 'five'"),
        ({"trainer": {"steps": True}}, "expected a whole number, got True"),
        ({"trainer": {"steps": 5.5}}, "expected a whole number, got 5.5"),
        ({"trainer": {"steps": -1}}, "`trainer.steps`: expected at least 0, got -1"),
        ({"device": "gpu"}, "`device`: expected 'cpu' or 'cuda', got 'gpu'; did you mean 'cuda'?"),
        ({"trainer": {"step_timeout_s": 0.0}}, "`trainer.step_timeout_s`: expected more than 0"),
        ({"task": {"held_out_fraction": 1.5}}, "expected at most 1, got 1.5"),
        ({"trainer": 5}, "`trainer`: expected a section"),
        ({"algorithm": {"advantage": "gpro"}}, "did you mean 'grpo'?"),
        (
            {"mode": {"name": "two_steps_off"}},
            "`mode.name`: expected 'sync', 'one_step_off', 'fully_async', got 'two_steps_off'",
        ),
        ({"task": {"name": "gsm9k"}}, "did you mean 'gsm8k'?"),
        ({"task": {"name": "gsm8k", "level": 2}}, "`task.level` belongs to task=arithmetic"),
        ({"engine": {"dtype": "bfloat16"}}, "it follows from model.dtype; set that instead"),
        ({"engine": {"model": {"path": "x"}}}, "it follows from the section `model`"),
        ({"model": {"path": 5}}, "`model.path`: expected text"),
        (
            {"engine": {"name": "megatron", "transformer_engine": "yes"}},
            "`engine.transformer_engine`: expected 'auto', 'e4m3', 'hybrid', True or False, got 'yes'",
        ),
        (
            {"engine": {"optimizer": {"lr": float("nan")}}},
            "`engine.optimizer.lr`: expected a finite number, got nan",
        ),
        ({"algorithm": {"entropy_coef": float("nan")}}, "`algorithm.entropy_coef`: expected a finite number"),
        ({"trainer": {"step_timeout_s": float("inf")}}, "expected a finite number, got inf"),
        (
            {"task": {"name": "file", "reward_weights": [1.0, float("nan")]}},
            "`task.reward_weights.1`: expected a finite number, got nan",
        ),
    ],
)
def test_what_is_wrong_is_said(raw: dict[str, Any], message: str):
    assert message in _problems(raw)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trainer.lr", "engine.optimizer.lr"),
        ("lr", "engine.optimizer.lr"),
        ("trainer.learning_rate", "engine.optimizer.lr"),
        ("trainer.batch_size", "trainer.prompts_per_step"),
        ("trainer.num_generations", "trainer.group_size"),
        ("warmup.batchsize", "warmup.batch_size"),
        ("trainer.temperature", "sampling.temperature"),
        ("max_tokens", "sampling.max_tokens"),
        ("max_completion_length", "sampling.max_tokens"),
        ("lora_rank", "engine.lora.rank"),
        ("num_gpus", "engine.num_ranks"),
        ("data", "task.train_path"),
        ("reward_funcs", "task.reward"),
    ],
)
def test_a_setting_of_the_warm_up_is_not_taken_for_one_of_the_run(typed: str, meant: str):
    assert suggestion(typed, known_paths()) == meant


@pytest.mark.parametrize(
    ("section", "meant"),
    [("model", "model.path"), ("reward", "task.reward"), ("environment", "environment.path")],
)
def test_a_value_in_the_place_of_a_section_is_answered_with_where_it_belongs(section: str, meant: str):
    assert f"did you mean `{meant}`?" in _problems({section: "me/tiny"})


def test_all_problems_are_named_at_once():
    assert _problems({"trainer": {"stpes": 5, "group_sise": 3}}).count("did you mean") == 2


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_every_mode_can_begin_spare_groups(mode: str):
    config = parse({"mode": {"name": mode, "over_sampling": 0.5}})
    assert config.asynchrony.over_sampling == 0.5


def test_null_means_the_default():
    assert parse({"model": {"path": None}, "trainer": {"steps": None}}) == parse({})


def test_every_number_has_some_bound_or_a_reason():
    # Any number may stand here: AdamW's constants, thresholds where <= 0 means off, a reward's scale.
    anything = {"beta1", "beta2", "eps", "max_grad_norm", "min_lr_ratio", "entropy_coef", "correct_at"}
    loose = {
        item.path
        for item in all_settings()
        if item.annotation in (int, float)
        and not (item.derived or item.limits or item.path.endswith("_timeout_s"))
    }
    assert {path.rsplit(".", 1)[-1] for path in loose} <= anything


@pytest.mark.spawns
def test_reading_settings_imports_nothing_heavy():
    code = (
        "import sys; import offbeat_recipes.settings.tree, offbeat_recipes.settings.reading; from offbeat_recipes.cli import train;"
        "code = train.main(['trainer.stpes=5']); heavy = {'torch', 'ray', 'vllm', 'transformers', 'numpy'};"
        "print(sorted(heavy & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 2
    assert done.stdout.strip() == "[]"
    assert (
        done.stderr.strip() == "offbeat train: unknown setting `trainer.stpes`; did you mean `trainer.steps`?"
    )


def test_config_alone_does_not_import_hydra():
    code = "import sys; import offbeat_recipes.settings.tree; print({'torch', 'hydra', 'omegaconf'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("seed", [2**32, 2**63 - 1])
def test_a_seed_may_have_63_bits(seed):
    assert parse({"seed": seed}).seed == seed


@pytest.mark.parametrize(
    ("seed", "said"), [(2**63, "at most 9223372036854775807"), (2**64, "at most"), (-1, "at least 0")]
)
def test_other_seeds_are_refused_in_a_sentence(seed, said):
    with pytest.raises(SettingError, match=f"`seed`: expected {said}"):
        parse({"seed": seed})


@pytest.mark.parametrize(
    ("raw", "lr"),
    [
        ({}, 1e-3),
        ({"model": {"path": "/m"}}, 1e-5),
        ({"model": {"path": "/m", "random_init": True}}, 1e-3),
        ({"model": {"path": "/m"}, "engine": {"lora": {"rank": 8}}}, 1e-4),
        ({"model": {"path": "/m"}, "warmup": {"lr": 2e-3}}, 2e-3),
    ],
)
def test_supervised_training_has_a_rate_that_fits_its_model(raw, lr):
    config = parse({"task": {"name": "gsm8k"}, **raw})
    assert config.supervised.lr == lr
    assert parse(to_dict(config)) == config


@pytest.mark.parametrize(
    ("engine", "replica", "task", "heads", "width"),
    [
        ({}, {}, {}, 3, 96),
        ({"name": "megatron", "num_ranks": 2, "tensor_parallel_size": 2}, {}, {}, 4, 128),
        ({"num_ranks": 3, "sequence_parallel_size": 3}, {}, {}, 3, 96),
        ({"num_ranks": 2, "sequence_parallel_size": 2}, {"tensor_parallel_size": 3}, {}, 6, 192),
        ({"num_ranks": 7, "sequence_parallel_size": 7}, {}, {}, 7, 224),
        ({"num_ranks": 2, "sequence_parallel_size": 2}, {}, {"hidden_size": 96}, 4, 96),
        ({"num_ranks": 2, "sequence_parallel_size": 2}, {}, {"num_heads": 3}, 3, 96),
        ({"num_ranks": 7, "sequence_parallel_size": 7}, {}, {"hidden_size": 96}, 3, 96),  # seven divide none
        ({}, {}, {"num_heads": 2}, 2, 64),
    ],
)
def test_a_task_s_model_has_heads_that_the_ranks_of_a_layer_can_share_out(
    engine: dict[str, Any], replica: dict[str, Any], task: dict[str, Any], heads: int, width: int
):
    config = parse({"engine": engine, "rollout": replica, "task": task})
    assert (config.task.num_heads, config.task.hidden_size) == (heads, width)
    assert parse(to_dict(config)) == config
    made = make_task(config.task, "", 0)
    assert (made.shape.num_heads, made.shape.hidden_size) == (heads, width)
    said = f"its model has {heads} attention heads and a hidden size of {width}; 3 and 96 are usual"
    assert made.notes == (() if heads == 3 else (said,))
