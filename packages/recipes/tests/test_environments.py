"""Environments in whole runs as a user types them: one of a file, the recipe's own, a failing one, and a kill in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import CalculatorConfig
from offbeat_recipes.testing import Command

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
RUN_TIMEOUT_S = 600.0
PAGE = ROOT / "docs" / "environments.md"
SMALL = (
    "rollout=hf", "trainer.prompts_per_step=2", "trainer.group_size=2", "trainer.validate_every=0",
    "trainer.validation_prompts=2",
)  # fmt: skip


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def of_a_file(tmp_path: Path, path: str, *settings: str) -> tuple[list[dict[str, float]], dict[str, object]]:
    """Train three steps on a file in the environment at `path`; return the metrics, and the summary."""
    task = make_task(CalculatorConfig(), "", 0)
    model = task.model_folder(tmp_path / "base", 0)
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": one.text, "answer": one.data["answer"]} for one in task.prompts(0, 8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "run"
    words = [
        "task=file", f"task.train_path={data}", f"task.validation_path={data}", f"model.path={model}", f"run_dir={folder}",
        f"environment.path={path}", "environment.max_turns=3", "environment.max_tokens=40", "task.max_prompt_tokens=16",
        "sampling.max_tokens=8", "rollout.max_model_len=64", "trainer.steps=3", *SMALL, *settings,
    ]  # fmt: skip
    Command("train", words, tmp_path / "log").succeed(RUN_TIMEOUT_S)
    return lines(folder), json.loads((folder / "summary.json").read_text())


def test_the_environment_of_the_examples_answers_a_run(tmp_path: Path, shared_ray: str):
    steps, _ = of_a_file(
        tmp_path, f"{ROOT}/examples/calculator.py:Calculator", shared_ray, "trainer.sample_every=1"
    )
    assert len(steps) == 3
    assert max(line["trajectory/turns_max"] for line in steps) >= 1
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    several = [one for one in samples if len(one.get("turns", ())) > 1]
    for one in several:
        assert one["turns"][1]["observed"] == 5, "four digits and a semicolon"


@pytest.mark.deep
def test_the_environment_of_the_page_answers_a_run(tmp_path: Path, shared_ray: str):
    [example] = re.findall(r"```python\n(# guess.py.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "guess.py").write_text(example)
    steps, _ = of_a_file(tmp_path, f"{tmp_path}/guess.py:Guess", shared_ray)
    assert len(steps) == 3


FAILS = """
from offbeat_trainer import Feedback
import os

class Fails:
    def reset(self, prompt, seed):
        self.bad = prompt.uid.endswith((":3", ":5", ":6"))  # of eight, six are met
        return ""
    def step(self, action):
        if self.bad: os._exit(1)
        return Feedback(observation="0;", reward=len(action.text))
"""


@pytest.mark.deep
def test_an_environment_that_takes_its_process_down_costs_its_group_and_nothing_else(
    tmp_path: Path, shared_ray: str
):
    (tmp_path / "fails.py").write_text(FAILS)
    steps, summary = of_a_file(tmp_path, f"{tmp_path}/fails.py:Fails", shared_ray)
    assert len(steps) == 3
    assert steps[-1]["buffer/dropped_environment_died_groups"] >= 1
    assert str(summary["dropped_groups"]).startswith("{'environment_died': ")


@pytest.mark.deep
def test_killed_in_the_middle_of_a_step_the_recipe_goes_on_to_the_same_end(tmp_path: Path, shared_ray: str):
    """A trajectory that was under way is begun anew: the resumed run has the metrics of the undisturbed one."""
    words = [
        "task=calculator",
        "warmup.steps=2",
        "trainer.steps=4",
        "trainer.save_every=1",
        shared_ray,
        *SMALL,
    ]
    ends: list[list[dict[str, float]]] = []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        if name == "killed":
            first = Command("train", [*words, f"run_dir={folder}"], tmp_path / "log" / "first")
            until = time.monotonic() + RUN_TIMEOUT_S
            while not (folder / "metrics.jsonl").exists() or len(lines(folder)) < 2:
                assert first.poll() is None, first.complained
                assert time.monotonic() < until
                time.sleep(0.02)
            os.kill(first.pid, signal.SIGKILL)
            first.wait(60.0)
        Command("train", [*words, f"run_dir={folder}", "resume=auto"], tmp_path / "log" / name).succeed(
            RUN_TIMEOUT_S
        )
        ends.append(lines(folder))
    skipped = ("time", "buffer/", "idle/", "sync/", "memory/")
    plain, killed = (
        [{key: value for key, value in line.items() if not key.startswith(skipped)} for line in steps]
        for steps in ends
    )
    assert [line["step"] for line in killed] == [1, 2, 3, 4]
    assert killed == plain


def test_supervised_training_is_measured_in_the_environment(tmp_path: Path, shared_ray: str):
    """A model that has seen nobody guess asks the calculator: its accuracy is that of whole trajectories, not of a first turn."""
    folder = tmp_path / "run"
    words = [
        "task=calculator", "task.careless=0", "warmup.steps=150", "rollout=hf", "trainer.validate_every=0",
        "trainer.validation_prompts=8", f"run_dir={folder}", shared_ray,
    ]  # fmt: skip
    Command("sft", words, tmp_path / "log").succeed(RUN_TIMEOUT_S)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    after = [one for one in samples if one["title"] == "after"]
    assert after
    assert max(len(one.get("turns", ())) for one in after) > 1


@pytest.mark.vllm
@pytest.mark.deep
def test_several_turns_with_vllm_are_what_the_trainer_computes(tmp_path: Path, shared_ray: str):
    folder = tmp_path / "run"
    words = [
        "task=calculator", "rollout=vllm", f"run_dir={folder}", "trainer.steps=2", "trainer.prompts_per_step=4",
        "trainer.group_size=4", "trainer.validation_prompts=4", "trainer.validate_every=0", shared_ray,
    ]  # fmt: skip
    Command("train", words, tmp_path / "log").succeed(RUN_TIMEOUT_S)
    steps = lines(folder)
    assert max(line["trajectory/turns_max"] for line in steps) > 1
    assert max(line["mismatch/max_abs_logprob_diff"] for line in steps) <= 1e-4


@pytest.mark.deep
def test_the_recipe_learns_to_ask(tmp_path: Path):
    folder = tmp_path / "run"
    words = [
        "task=calculator", "rollout=hf", f"run_dir={folder}", "trainer.steps=20", "trainer.prompts_per_step=8",
        "trainer.group_size=8", "trainer.validation_prompts=64", "trainer.validate_every=0",
    ]  # fmt: skip
    Command("train", words, tmp_path / "log").succeed(3 * RUN_TIMEOUT_S)
    steps = lines(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3
    assert steps[-1]["trajectory/turns_mean"] > steps[0]["trajectory/turns_mean"] + 0.5
