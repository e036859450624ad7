import json
from dataclasses import replace

import pytest
import torch

import offbeat_engine
from offbeat_engine import (
    ConfigError,
    Dtype,
    Feature,
    Fsdp2Config,
    ModelConfig,
    OptimizerConfig,
    OptimizerName,
    Schedule,
    World,
    engine_class,
)
from offbeat_engine.fsdp2 import Fsdp2Engine
from offbeat_engine.testing import make_tiny_model

GOOD = Fsdp2Config(model=ModelConfig(path="nowhere"))


def test_every_public_name_is_listed_and_there():
    assert offbeat_engine.__all__
    for name in offbeat_engine.__all__:
        assert getattr(offbeat_engine, name) is not None


def test_the_registry_knows_the_engine():
    assert engine_class("fsdp2") is Fsdp2Engine


def test_every_feature_is_either_there_or_missing_with_a_reason():
    said = Fsdp2Engine.capabilities()
    assert said.features | said.missing.keys() == set(Feature)
    assert not said.features & said.missing.keys()
    assert all(said.missing.values())


def test_a_good_config_is_taken_on_any_number_of_ranks():
    assert Fsdp2Engine.check(GOOD, 1) == Fsdp2Engine.check(GOOD, 8) == []


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"collective_timeout_s": 0.0}, "collective_timeout_s"),
        ({"attention": "eager"}, "attention"),
        ({"optimizer": OptimizerConfig(name=OptimizerName.ADAFACTOR)}, "optimizer.name"),
        ({"optimizer": OptimizerConfig(lr=-1.0)}, "optimizer.lr"),
        ({"optimizer": OptimizerConfig(beta2=1.0)}, "optimizer.beta2"),
        ({"optimizer": OptimizerConfig(eps=0.0)}, "optimizer.eps"),
        ({"optimizer": OptimizerConfig(schedule=Schedule.COSINE)}, "optimizer.total_steps"),
        ({"attention": "varlen", "device": "cuda"}, "attention"),
        ({"attention": "varlen", "packing": False}, "attention"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_name(changes, setting):
    refused = Fsdp2Engine.check(replace(GOOD, **changes), 1)
    assert [refusal.setting for refusal in refused] == [setting]
    with pytest.raises(ConfigError, match=setting):
        Fsdp2Engine(replace(GOOD, **changes), World()).init_model()


@pytest.mark.parametrize(
    ("changes", "num_ranks", "reason"),
    [
        ({"sequence_parallel_size": 3}, 4, "must divide the number of ranks, 4, got 3"),
        ({"sequence_parallel_size": 0}, 4, "must divide the number of ranks, 4, got 0"),
        ({"sequence_parallel_size": 2, "packing": False}, 4, "only packed rows"),
        ({"sequence_parallel_size": 8}, 8, "must divide the 4 attention heads"),
        ({"shard_size": 3}, 4, "must divide the number of ranks, 4, got 3"),
        ({"shard_size": -1}, 4, "must divide the number of ranks, 4, got -1"),
        ({"shard_size": 8}, 4, "must divide the number of ranks, 4, got 8"),
    ],
    ids=str,
)
def test_arrangements_of_ranks_that_do_not_come_out_even_are_refused(tiny, changes, num_ranks, reason):
    config = replace(GOOD, model=ModelConfig(path=tiny), **changes)
    (refusal,) = Fsdp2Engine.check(config, num_ranks)
    assert refusal.setting == next(iter(changes))
    assert reason in refusal.reason


def test_who_plans_needs_no_gpu():
    """A cluster's head node has none: what a rank's machine must have is the rank's to look at."""
    for changes in ({}, {"attention": "varlen"}, {"compile": True}, {"deterministic": True}):
        config = replace(GOOD, device="cuda", dtype=Dtype.BFLOAT16, **changes)
        assert Fsdp2Engine.check(config, 8) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_rank_without_its_gpu_is_refused_by_name():
    config = replace(GOOD, device="cuda")
    with pytest.raises(
        ConfigError, match=r"device: rank 0 computes on cuda:0, and its process sees 0 CUDA devices"
    ):
        Fsdp2Engine(config, World(device="cuda")).init_model()


@pytest.mark.parametrize("pair", [("cpu", "cuda"), ("cuda", "cpu")])
def test_two_devices_for_one_engine_are_refused_by_name(pair):
    with pytest.raises(ConfigError, match=rf'compute on "{pair[0]}", its rank is on "{pair[1]}"'):
        Fsdp2Engine(replace(GOOD, device=pair[0]), World(device=pair[1])).init_model()


def cuda_for_rank_one(world, path):
    world = replace(world, device="cuda" if world.rank else "cpu")
    try:
        Fsdp2Engine(replace(GOOD, model=ModelConfig(path=path)), world).init_model()
    except ConfigError as error:
        return str(error)


def test_what_one_rank_lacks_is_raised_by_all(tiny, two_ranks):
    first, second = two_ranks.run(cuda_for_rank_one, tiny)
    assert first == second
    assert first.startswith("rank 1: device: the engine is to compute on")


def test_all_reasons_come_at_once():
    bad = replace(GOOD, micro_batch_tokens=0, optimizer=OptimizerConfig(lr=-1.0))
    assert {refusal.setting for refusal in Fsdp2Engine.check(bad, 0)} == {
        "num_ranks",
        "micro_batch_tokens",
        "optimizer.lr",
    }


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        Fsdp2Engine(replace(GOOD, model=ModelConfig(path=str(tmp_path))), World()).init_model()


def test_a_config_of_which_transformers_makes_no_model_is_refused_when_planned_and_when_loaded(tmp_path):
    path = make_tiny_model(tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**shape, "num_attention_heads": 0}))
    config = replace(GOOD, model=ModelConfig(path=path))
    (refusal,) = Fsdp2Engine.check(config, 1)
    assert (refusal.setting, "ZeroDivisionError" in refusal.reason) == ("model.path", True)
    with pytest.raises(ConfigError, match="division"):
        Fsdp2Engine(config, World()).init_model()


def test_a_model_that_changes_its_logits_is_refused(tmp_path):
    path = make_tiny_model(tmp_path, family="gemma2")
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        Fsdp2Engine(replace(GOOD, model=ModelConfig(path=path)), World()).init_model()


def test_attention_that_caps_its_scores_is_refused_when_packed(tmp_path):
    path = make_tiny_model(tmp_path, family="gemma2", final_logit_softcapping=None)
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        Fsdp2Engine(replace(GOOD, model=ModelConfig(path=path)), World()).init_model()
