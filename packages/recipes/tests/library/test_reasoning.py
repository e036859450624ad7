"""Tasks of reasoning-gym, where it is installed: it needs a C compiler, so it is not among the packages of these tests."""

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.base import make_task
from offbeat_recipes.testing import check_task

NAME = "offbeat_recipes.library.reasoning:ReasoningGym"


def task_of(model, *settings):
    config = compose_run([f"task={NAME}", f"model.path={model}", *settings])
    return make_task(config.task, config.model.path, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from offbeat_recipes.tasks.config import ArithmeticConfig

    return make_task(ArithmeticConfig(), "", 0).model_folder(tmp_path_factory.mktemp("model") / "base", 0)


def test_without_the_library_a_sentence_says_what_to_install(model, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match="uv pip install reasoning-gym"):
        task_of(model)


def test_its_questions_and_scores_are_those_of_the_library(model):
    library = pytest.importorskip("reasoning_gym")
    task = task_of(
        model,
        "task.dataset=chain_sum",
        "task.args.min_terms=2",
        "task.args.max_terms=3",
        "task.max_prompt_tokens=400",
    )
    check_task(task)
    for prompt in task.prompts(0, 4):
        entry = prompt.data["entry"]
        assert prompt.text.startswith(entry["question"])
        assert (
            task.reward(entry["answer"], prompt.data)
            == task.reward(f"so <answer>{entry['answer']}</answer>", prompt.data)
            == 1
        )
        assert task.reward("none", prompt.data) == library.create_dataset(
            "chain_sum", size=1, seed=0
        ).score_answer("none", entry)
    with pytest.raises(TaskError, match="makes no 'no_such'"):
        task_of(model, "task.dataset=no_such")
