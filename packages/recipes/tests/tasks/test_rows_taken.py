"""Which rows of a file are taken, and what their columns are called."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.errors import DataError, SettingError, TaskError
from offbeat_recipes.tasks.config import FileConfig
from offbeat_recipes.tasks.file import FileTask

if TYPE_CHECKING:
    from pathlib import Path


def _task(tmp_path: Path, rows: list[dict[str, Any]], model: str, **more: Any) -> FileTask:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileTask(FileConfig(train_path=str(path), validation_path=str(path), **more), model, seed=0)


def test_columns_of_other_names_are_read_by_ours(tmp_path: Path, plain_model: str):
    rows = [
        {"question": "1=", "solution": "1", "prompt": "other"},
        {"question": "2=", "solution": "2", "prompt": ""},
    ]
    named = {"prompt": "question", "answer": "solution"}
    task = _task(tmp_path, rows, plain_model, columns=named)
    [first, _] = task.validation_prompts(2)
    assert (first.text, first.data) == ("1=", {"prompt": "1=", "answer": "1"})
    words = "row 1: no 'problem', which task.columns.prompt names; it has prompt, question, solution"
    with pytest.raises(DataError, match=words):
        _task(tmp_path, rows, plain_model, columns={"prompt": "problem"})
    with pytest.raises(
        DataError, match=r"no 'prompt'; it has question. task.columns.prompt names another column"
    ):
        _task(tmp_path, [{"question": "1="}], plain_model)
    with pytest.raises(SettingError, match=r"task.prompt_key`; it is task.columns.prompt now"):
        compose_run(["task=file", "task.prompt_key=question"])
    assert compose_run(["task=file", "task.columns.prompt=question"]).task.columns == {"prompt": "question"}


FILTERS = """
def easy(row):
    return row["level"] < 2

def none(row):
    return False

def broken(row):
    return row["nothing"]
"""


def test_a_filter_takes_rows_and_says_how_many(tmp_path: Path, plain_model: str):
    rows = [{"prompt": f"{n}=", "answer": "1", "level": n} for n in range(4)]
    (tmp_path / "keeps.py").write_text(FILTERS)
    task = _task(tmp_path, rows, plain_model, filter=f"{tmp_path}/keeps.py:easy")
    assert [one.data["level"] for one in task.validation_prompts(9)] == [0, 1]
    assert {one.data["level"] for one in task.prompts(0, 2)} == {0, 1}
    assert f"{tmp_path}/rows.jsonl: task.filter takes 2 of 4 rows" in task.notes
    for name, words in (
        ("none", "takes none of 4 rows"),
        ("broken", "rows.jsonl, row 1: KeyError: 'nothing'"),
        ("absent", "has no 'absent'"),
    ):
        with pytest.raises(TaskError, match=f"task.filter: .*{words}"):
            _task(tmp_path, rows, plain_model, filter=f"{tmp_path}/keeps.py:{name}")
