"""End tokens that the model does not have, and texts that nobody can read, are refused before anything starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from offbeat_recipes.cli import train
from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.tasks.arithmetic import ArithmeticTask
from offbeat_recipes.tasks.base import make_task

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE = 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model with its tokenizer."""
    return make_task(compose_run([]).task, "", 0).model_folder(tmp_path / "base", 0)


def refusals(*settings: str) -> list[str]:
    return [str(item) for item in gather_facts(compose_run(settings)).refusals]


def files_task(model: Path) -> list[str]:
    """Settings of a task that takes the folder's tokenizer as it is."""
    rows = model / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": ":2"}\n')
    (model / "length_reward.py").write_text("def length(completion): return len(completion)\n")
    return [
        "task=file",
        f"task.reward={model}/length_reward.py:length",
        f"model.path={model}",
        f"task.train_path={rows}",
        f"task.validation_path={rows}",
    ]


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("ends", "strange"), [([1, 20], "token 20"), (151645, "token 151645"), ([-1, 99], "tokens -1, 99")]
)
def test_an_end_token_in_the_models_files(model: Path, name: str, ends: object, strange: str):
    assert refusals(f"model.path={model}") == []
    if name == "config.json":
        (model / "generation_config.json").unlink()
    path = model / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    [refusal] = refusals(f"model.path={model}")
    assert refusal.startswith("model.path: ")
    assert f"{strange}, outside the model's vocabulary of {VOCAB_SIZE};" in refusal
    assert "generation_config.json" in refusal


def test_an_end_token_that_was_added_to_the_tokenizer_alone(model: Path):
    settings = files_task(model)
    assert refusals(*settings) == []
    task = make_task(compose_run(settings).task, str(model), 0)
    task.tokenizer.add_special_tokens({"eos_token": "<end>"})
    task.tokenizer.save_pretrained(model)
    [refusal] = refusals(*settings)
    assert f"token {VOCAB_SIZE}, outside the model's vocabulary of {VOCAB_SIZE};" in refusal


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 3}', b'{"model": 3}', b"\x00\xff\xfe" * 100])
@pytest.mark.parametrize("task", ["file", "arithmetic"])
def test_a_tokenizer_file_that_is_damaged_is_refused_in_a_sentence(model: Path, content: bytes, task: str):
    settings = files_task(model) if task == "file" else [f"model.path={model}", "rollout=hf"]
    assert refusals(*settings) == []
    (model / "tokenizer.json").write_bytes(content)
    found = [one for one in refusals(*settings) if one.startswith("model.path: ")]
    assert f"the tokenizer in {model} cannot be read: " in found[0]
    assert len(found[0].splitlines()) == 1


def test_texts_to_stop_at_where_nobody_knows_the_text_of_a_token(model: Path):
    settings = (f"model.path={model}", "rollout=hf")
    assert compose_run(settings).rollout_config("").stop_strings is False
    assert compose_run([*settings, "sampling.stop=['\n']"]).rollout_config("").stop_strings is True
    assert refusals(*settings, "sampling.stop=[x]") == []
    (model / "tokenizer.json").unlink()
    assert not [one for one in refusals(*settings) if one.startswith("sampling.stop")]
    [refusal] = [one for one in refusals(*settings, "sampling.stop=[x]") if one.startswith("sampling.stop")]
    assert refusal.startswith(f"sampling.stop: hf: `stop_strings`: '{model}' holds no tokenizer.json")


def test_a_task_that_names_one_itself_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(ArithmeticTask, "stop_token_ids", lambda self: (99,))
    assert train.main([f"run_dir={tmp_path / 'run'}", "report.console=false"]) == 2
    error = capsys.readouterr().err
    assert f"token 99, outside the model's vocabulary of {VOCAB_SIZE}" in error
    assert "make the task's tokenizer and model.path agree" in error
