"""Tasks of one's own: by the path of a class, with settings that are given, checked and printed as all others are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from offbeat_recipes import GeneratedConfig, GeneratedTask, Trainer
from offbeat_recipes.cli._hydra import compose_run, to_yaml
from offbeat_recipes.errors import SettingError, TaskError
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.planning.plan import plan_run
from offbeat_recipes.settings.reading import to_dict
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import ArithmeticConfig
from offbeat_recipes.tasks.registry import task_class, task_config_class, task_names
from offbeat_recipes.testing import Command, check_task

EXAMPLE = Path(__file__).parents[4] / "examples" / "sort_digits.py"
OWN = f"task={EXAMPLE}:SortDigits"
RUN_TIMEOUT_S = 1200.0


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose tokens are digits and marks."""
    task = make_task(ArithmeticConfig(), "", 0)
    return str(task.model_folder(tmp_path_factory.mktemp("digits"), 0))


def test_its_settings_are_settings_and_the_run_is_called_like_the_class(digits: str):
    config = compose_run([OWN, f"model.path={digits}", "task.num_digits=3", "task.text=[{digits}]="])
    assert (config.name, str(config.folder), config.task.name) == (
        "SortDigits", "runs/SortDigits", f"{EXAMPLE}:SortDigits"
    )  # fmt: skip
    told = to_dict(config)["task"]
    assert (told["num_digits"], told["text"], told["held_out_fraction"]) == (3, "[{digits}]=", 0.1)
    assert "level" not in told
    assert config.warmup.steps == 0, "what suits the sums is not laid over another task"
    with pytest.raises(SettingError, match=r"`task\.num_digits`: expected at least 2, got 1"):
        compose_run([OWN, "task.num_digits=1"])
    with pytest.raises(
        SettingError, match=r"unknown setting `task\.num_digit`; did you mean `task\.num_digits`"
    ):
        compose_run([OWN, "task.num_digit=3"])
    with pytest.raises(
        SettingError, match=r"`task\.level` belongs to task=arithmetic; this run has task=.*SortDigits"
    ):
        compose_run([OWN, "task.level=1"])


def test_the_settings_of_a_run_are_read_back_and_another_task_is_not_laid_over_them(
    digits: str, tmp_path: Path
):
    config = compose_run([OWN, f"model.path={digits}", "task.num_digits=3"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    file = str(tmp_path / "config.yaml")
    assert compose_run([], file) == compose_run([OWN], file) == config
    with pytest.raises(SettingError, match="another task needs others"):
        compose_run(["task=gsm8k"], file)


def test_prompts_are_pure_functions_and_training_never_meets_what_is_held_out(digits: str):
    task = make_task(compose_run([OWN, f"model.path={digits}"]).task, digits, 3)
    held_out = {prompt.text for prompt in task.validation_prompts(64)}
    trained = [{prompt.text for prompt in task.prompts(step, 32)} for step in range(8)]
    assert [len(step) for step in trained] == [32] * 8
    assert not held_out & set().union(*trained)
    assert task.prompts(5, 32) == task.prompts(5, 32) != task.prompts(6, 32)
    [example] = task.examples(0, 1)
    assert task.decode(example.completion_ids).startswith(":")
    assert example.completion_ids[-1] in task.stop_token_ids()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ["task.max_prompt_tokens=3"],
            "a prompt of SortDigits has 5 tokens, more than task.max_prompt_tokens 3",
        ),
        (["task.num_digits=2"], "has not 300 different prompts for training; let `ask` make more"),
    ],
)
def test_what_a_task_cannot_do_is_said_with_the_setting(digits: str, settings: list[str], says: str):
    config = compose_run([OWN, f"model.path={digits}", *settings])
    with pytest.raises(TaskError, match=says):
        make_task(config.task, digits, 0).prompts(0, 300)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 1 / 0, {}", r"raised ZeroDivisionError: division by zero, .*mine\.py, line 3"),
        ("return 'text'", "must return a text or messages, and a dict; got 'text'"),
    ],
)
def test_a_mistake_in_it_is_said_with_its_place(tmp_path: Path, digits: str, body: str, says: str):
    path = tmp_path / "mine.py"
    path.write_text(
        f"from offbeat_recipes import GeneratedTask\nclass Mine(GeneratedTask):\n    def ask(self, rng): {body}\n"
        "    def reward(self, completion, data): return 1.0\n"
    )
    config = compose_run([f"task={path}:Mine", f"model.path={digits}"])
    with pytest.raises(TaskError, match=says):
        make_task(config.task, digits, 0).prompts(0, 1)


@pytest.mark.parametrize("name", ["arithmetic", "calculator", "file", "own"])
def test_tasks_keep_their_contract(name: str, digits: str, tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(12)))
    (tmp_path / "held.jsonl").write_text('{"prompt": "20+1="}\n' * 4)
    settings = {
        "own": [OWN],
        "file": [
            "task=file",
            f"task.train_path={tmp_path}/train.jsonl",
            f"task.validation_path={tmp_path}/held.jsonl",
        ],
    }
    config = compose_run(
        [*settings.get(name, [f"task={name}"]), f"model.path={'' if name == 'calculator' else digits}"]
    )
    check_task(make_task(config.task, config.model.path, 0))


def test_what_breaks_the_contract_is_said(digits: str, tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import itertools\nfrom offbeat_recipes import GeneratedTask\ncount = itertools.count(1000)\n"
        "class Moving(GeneratedTask):\n    def ask(self, rng): return f'{next(count)}=', {}\n    def reward(self, completion, data): return 1.0\n"
        "class Moody(GeneratedTask):\n    def ask(self, rng): return f'{rng.integers(1, 10**6)}=', {}\n"
        "    def reward(self, completion, data): return next(count)\n"
        "class Leaky(Moody):\n    def validation_prompts(self, num_prompts): return self.prompts(0, num_prompts)\n"
    )
    for name, says in (
        ("Moving", "must be the same ones whenever asked again"),
        ("Moody", "the same completion is worth"),
        ("Leaky", "training meets what is held out"),
    ):
        config = compose_run([f"task={path}:{name}", f"model.path={digits}"])
        with pytest.raises(AssertionError, match=says):
            check_task(make_task(config.task, digits, 0))


def test_what_is_no_task_is_refused_with_what_it_lacks(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "class Half:\n    def prompts(self, step, n): ...\n    def decode(self, ids): ...\n"
        "class Settings(dict): pass\n"
        "from offbeat_recipes import GeneratedTask\n"
        "class Silent(GeneratedTask): ...\n"
        "class Wrong(GeneratedTask):\n    Config = Settings\n    ask = reward = None\n"
        "def function(): ...\n"
    )
    for name, says in (
        ("Half", "lacks `validation_prompts`, `examples`, `stop_token_ids`, `tokenizer`, `model_folder`"),
        ("Silent", "lacks `ask`, `reward`"),
        ("Wrong", "its `Config` must be a subclass of TaskConfig"),
        ("function", "is no class"),
        ("Missing", "Missing"),
    ):
        with pytest.raises(SettingError, match=says):
            compose_run([f"task={path}:{name}"])
    with pytest.raises(TaskError, match=r"no task named 'mine'.*offbeat\.tasks"):
        task_class("mine")
    assert task_names() == [
        "arithmetic", "calculator", "code", "countdown", "file", "gsm8k", "pairs", "sql", "word_game"
    ]  # fmt: skip
    assert [task_config_class(name).__name__ for name in task_names()] == [
        "ArithmeticConfig", "CalculatorConfig", "CodeConfig", "CountdownConfig", "FileConfig", "Gsm8kConfig", "PairsConfig",
        "SqlConfig", "WordGameConfig",
    ]  # fmt: skip


def test_a_plan_knows_it(digits: str):
    config = compose_run(
        [
            OWN,
            f"model.path={digits}",
            "rollout=hf",
            "rollout.max_model_len=32",
            "task.max_prompt_tokens=16",
            "sampling.max_tokens=8",
        ]
    )
    plan = plan_run(config, gather_facts(config, opens_data=True))
    assert [str(refusal) for refusal in plan.refusals] == []
    [refusal] = gather_facts(compose_run([OWN])).refusals
    assert (refusal.setting, refusal.reason) == ("model.path", "not given, and this task makes no model")
    dpo = compose_run([OWN, f"model.path={digits}", "algorithm=dpo"])
    assert any("SortDigits has none" in str(one) for one in gather_facts(dpo).refusals)


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_trains_on_it(digits: str, tmp_path: Path):
    words = [
        OWN, f"model.path={digits}", "rollout=hf", "rollout.max_model_len=32", "task.max_prompt_tokens=16", "sampling.max_tokens=8", "task.num_digits=2",
        "warmup.steps=20", "warmup.lr=4e-3", "warmup.batch_size=16", "trainer.steps=3", "trainer.prompts_per_step=8",
        "trainer.group_size=4", "trainer.validation_prompts=4", f"run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    Command("train", words, tmp_path / "said").succeed(RUN_TIMEOUT_S)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3


def test_a_class_of_a_script_is_a_task(digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings(GeneratedConfig):
        largest: int = 9

    class Largest(GeneratedTask):
        Config = Settings

        def ask(self, rng):
            digits = [*map(str, rng.integers(1, self.config.largest + 1, 6))]
            return f"{''.join(digits)}=", {"largest": max(digits)}

        def reward(self, completion, data):
            return float(completion == data["largest"])

    monkeypatch.chdir(tmp_path)
    few = {"name": "few", "task.largest": 3, "task.max_prompt_tokens": 16, "sampling.max_tokens": 2}
    trainer = Trainer(model=digits, task=Largest, rollout={"name": "hf", "max_model_len": 64}, **few)
    shown = trainer.plan()
    assert (shown.refusals, shown.plan.batch.max_tokens_per_sequence) == ([], 18)
    with pytest.raises(SettingError, match=r"`task\.largest`: expected a whole number, got 'many'"):
        Trainer(model=digits, task=Largest, **{"task.largest": "many"}).plan()
