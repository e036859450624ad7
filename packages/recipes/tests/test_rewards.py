"""Rewards of one's own, in whole runs as a user types them: those of the examples, and one that fails in every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbeat_recipes.report.advice import advice
from offbeat_recipes.report.collect import collect
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import ArithmeticConfig
from offbeat_recipes.testing import Command

pytestmark = [pytest.mark.ray, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[3] / "examples"
RUN_TIMEOUT_S = 600.0
FAILS = """
import os, time

def score(completion, how):
    if how == "raises": raise KeyError("no such answer")
    if how == "hangs": time.sleep(3600)
    if how == "nan": return float("nan")
    if how == "exits": os._exit(1)
    return len(completion)
"""


WAITS = """
import time

def score(completion):
    time.sleep(0.5)
    return sum(map(ord, completion)) % 10
"""


def train(
    tmp_path: Path, rows: list[dict[str, str]], *settings: str
) -> tuple[list[dict[str, float]], dict[str, object]]:
    """Train on `rows` with a small model; return the metrics of all steps, and the summary."""
    model = make_task(ArithmeticConfig(), "", 0).model_folder(tmp_path / "base", 0)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fine = tmp_path / "fine.jsonl"
    fine.write_text(json.dumps(rows[0]) + "\n")
    folder = tmp_path / "run"
    words = [
        "task=file", f"task.train_path={data}", f"task.validation_path={fine}", f"model.path={model}", f"run_dir={folder}",
        "rollout=hf", "rollout.max_model_len=64", "task.max_prompt_tokens=16", "sampling.max_tokens=6",
        "trainer.steps=3", "trainer.prompts_per_step=2", "trainer.group_size=2", "trainer.validate_every=0", *settings,
    ]  # fmt: skip
    Command("train", words, tmp_path / "log").succeed(RUN_TIMEOUT_S)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return steps, json.loads((folder / "summary.json").read_text())


def test_the_rewards_of_the_examples_score_a_run(tmp_path: Path, shared_ray: str):
    rows = [{"prompt": f"{a}+2=", "answer": f":{a + 2}"} for a in range(10, 18)]
    # In a list Hydra's grammar takes a path with a space, or a letter that is not ASCII, in quotes.
    rewards = f"task.reward=['{EXAMPLES}/rewards.py:right','{EXAMPLES}/rewards.py:brief']"
    steps, _ = train(tmp_path, rows, rewards, "task.reward_weights=[1,0.1]", shared_ray)
    assert len(steps) == 3
    for line in steps:
        assert line["reward/mean"] == pytest.approx(
            line["reward/right_mean"] + 0.1 * line["reward/brief_mean"]
        )
        assert line["reward/brief_mean"] <= 0 <= line["reward/right_mean"]


def test_a_reward_that_fails_in_every_way_costs_those_groups_and_nothing_else(
    tmp_path: Path, shared_ray: str
):
    rows = [{"prompt": f"{a}+2=", "how": "fine"} for a in range(10, 14)]
    rows += [
        {"prompt": f"{a}+3=", "how": how}
        for a, how in zip(range(10, 14), ("raises", "hangs", "nan", "exits"), strict=True)
    ]
    (tmp_path / "fails_in_a_run.py").write_text(FAILS)
    steps, summary = train(
        tmp_path, rows, f"task.reward={tmp_path}/fails_in_a_run.py:score", "reward.timeout_s=10", "reward.max_attempts=1",
        shared_ray,
    )  # fmt: skip
    assert [line["step"] for line in steps] == [1, 2, 3]
    reasons = ("raised", "timed_out", "not_a_number", "died")
    dropped = {f"reward_{reason}": steps[-1][f"buffer/dropped_reward_{reason}_groups"] for reason in reasons}
    assert min(dropped.values()) >= 1
    assert summary["dropped_groups"] == dropped


def test_a_slow_reward_is_what_the_end_of_a_run_advises_on(tmp_path: Path, shared_ray: str):
    (tmp_path / "waits_in_a_run.py").write_text(WAITS)
    train(
        tmp_path, [{"prompt": f"{a}+2="} for a in range(10, 18)], f"task.reward={tmp_path}/waits_in_a_run.py:score",
        "trainer.steps=12", "reward.concurrency=1", shared_ray,
    )  # fmt: skip
    [found] = [one for one in advice(collect(tmp_path / "run")) if one.setting.startswith("raise reward")]
    assert found.setting == "raise reward.concurrency (now 1)"
    assert found.means in " ".join((tmp_path / "log.out").read_text().replace("│", " ").split())
