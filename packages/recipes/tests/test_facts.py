"""What is looked up before a plan is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.facts import Facts, gather_facts
from offbeat_recipes.plan import plan_run

if TYPE_CHECKING:
    from pathlib import Path


def _refused(facts: Facts) -> dict[str, str]:
    return {item.setting: item.reason for item in facts.refusals}


def test_the_tiny_model_is_counted_without_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import AutoModelForCausalLM

    from offbeat_recipes.tasks.base import make_task

    monkeypatch.chdir(tmp_path)
    config = compose_run([])
    facts = gather_facts(config)
    assert list(tmp_path.iterdir()) == []
    assert facts.model is not None
    folder = make_task(config.task, "", 0).model_folder(tmp_path, 0)
    real = AutoModelForCausalLM.from_pretrained(folder)
    assert facts.model.num_params == sum(parameter.numel() for parameter in real.parameters())
    assert (facts.model.num_layers, facts.model.vocab_size) == (2, 20)
    assert facts.max_prompt_tokens == 6
    named = gather_facts(compose_run([f"model.path={folder}"]))
    assert named.model == facts.model
    assert facts.refusals == named.refusals == ()


def test_a_driver_without_a_gpu_plans_for_a_cluster_that_has_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = compose_run(
        ["device=cuda", "model.dtype=bfloat16", "cluster.ray_address=head:6379", "engine.compile=true"]
    )
    facts = gather_facts(config)
    assert facts.refusals == ()
    assert plan_run(config, facts).refusals == ()


def test_a_gpu_of_the_driver_is_not_taken_for_one_of_the_cluster(monkeypatch: pytest.MonkeyPatch):
    def asked(*_: object) -> None:
        pytest.fail("the cluster's GPUs are not this machine's")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", asked)
    monkeypatch.setattr("torch.cuda.device_count", asked)
    facts = gather_facts(
        compose_run(["device=cuda", "model.dtype=bfloat16", "cluster.ray_address=head:6379"])
    )
    assert (facts.num_gpus, facts.gpu_gib) == (0, 0.0)


def test_missing_files_and_models_are_named():
    refused = _refused(gather_facts(compose_run(["task=file", "task.train_path=nowhere.jsonl"])))
    assert refused["task.train_path"] == "no file nowhere.jsonl"
    assert {"task.validation_path", "task.reward", "model.path"} <= set(refused)


@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ("model.path=nowhere", "model.path"),
        ("engine.optimizer.beta1=1.5", "engine.optimizer.beta1"),
        ("task.level=12", "task"),
    ],
)
def test_what_the_parts_refuse(setting: str, refused: str):
    assert refused in _refused(gather_facts(compose_run([setting])))
