# pyright: basic
"""Rows of the library `datasets` as it is: in memory, filtered, streamed, and several splits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_recipes import DataError, Trainer
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.tasks.config import ArithmeticConfig

RUN_TIMEOUT_S = 600
PROGRAM = """
import sys
import datasets
from offbeat_recipes import Trainer

rows = datasets.Dataset.from_list([{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n % 2} for n in range(8)])
train = rows.filter(lambda row: row["level"] == 0).rename_column("answer", "solution").shuffle(seed=1)
held_out = rows.to_iterable_dataset().map(lambda row: {**row, "solution": row["answer"]}).take(3)

def right(completion, solution):
    return float(completion == solution)

result = Trainer(model=sys.argv[1], reward=right, data=train, validation=held_out, rollout="hf", run_dir=sys.argv[2],
                 trainer={"steps": 1, "prompts_per_step": 2, "group_size": 2}, sampling={"max_tokens": 4}).train()
assert result.summary["steps"] == 1
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_task(ArithmeticConfig(), "", 0).model_folder(tmp_path_factory.mktemp("model") / "m", 0))


@pytest.mark.ray
@pytest.mark.deep
def test_a_dataset_and_a_stream_are_rows_of_a_run(datasets, model, tmp_path):
    beside = str(Path(datasets.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": beside},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    train, held_out = (
        [json.loads(line) for line in (tmp_path / "run" / "objects" / name).read_text().splitlines()]
        for name in ("train.jsonl", "validation.jsonl")
    )
    assert {row["solution"] for row in train} == {"1", "3", "5", "7"}
    assert [row["prompt"] for row in held_out] == ["0+1=", "1+1=", "2+1="]


@pytest.mark.deep
def test_several_splits_at_once_are_answered_with_their_names(datasets, model):
    rows = datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}])
    splits = datasets.DatasetDict({"train": rows, "test": rows})
    with pytest.raises(DataError, match=r"got train, test by name; give one of them, say data\['train'\]"):
        Trainer(model=model, reward="mine.py:right", data=splits)
