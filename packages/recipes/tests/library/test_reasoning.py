"""Tasks of reasoning-gym: the library is beside our packages, where a C compiler can make what it needs."""

from decimal import Decimal, getcontext

import numpy as np
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


@pytest.mark.deep
def test_its_questions_and_scores_are_those_of_the_library(model, reasoning_gym):
    import reasoning_gym as library

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


@pytest.mark.deep
def test_an_answer_that_the_library_cannot_read_is_wrong(model, reasoning_gym):
    task = task_of(model, "task.dataset=prime_factorization", "task.max_prompt_tokens=400")
    [prompt] = task.prompts(0, 1)
    assert [task.reward(said, prompt.data) for said in (prompt.data["entry"]["answer"], "none")] == [1, 0]


@pytest.mark.deep
@pytest.mark.parametrize("dataset", ["decimal_arithmetic", "pool_matrix"])
def test_what_a_dataset_sets_for_the_whole_process_stays_as_it_was(model, reasoning_gym, dataset):
    before = getcontext().prec, np.random.get_state()[1].tolist()
    task_of(model, f"task.dataset={dataset}", "task.max_prompt_tokens=2000").prompts(0, 2)
    assert (getcontext().prec, np.random.get_state()[1].tolist()) == before


@pytest.mark.deep
def test_levels_of_a_curriculum_begin_at_their_steps_and_validation_is_of_the_last(model, reasoning_gym):
    words = ["task.dataset=decimal_arithmetic", "task.max_prompt_tokens=2000"]
    task = task_of(model, *words, "task.level_steps=[2,3]")
    check_task(task)
    by_step = [[prompt.data for prompt in task.prompts(step, 4)] for step in (0, 1, 2, 3, 9)]
    assert [[one["level"] for one in step] for step in by_step] == [[level] * 4 for level in (0, 0, 1, 2, 2)]
    for step, steps in ((1, "[9,9]"), (2, "[0,9]"), (3, "[0,0]")):
        assert task.examples(step, 2) == task_of(model, *words, f"task.level_steps={steps}").examples(step, 2)
    assert {one.data["level"] for one in task.validation_prompts(4)} == {2}
    assert task.prompts(1, 4) == task_of(model, *words, "task.level_steps=[2,3]").prompts(1, 4), "goes on"
    for (data, *_), nearly in ((by_step[0], 1), (by_step[-1], 0)):
        right = Decimal(data["entry"]["answer"])
        assert task.reward(str(right), data) == 1
        assert task.reward(str(right + Decimal("0.00005")), data) == nearly, "as exact as the level is"
    for steps, said in (("[5,2]", "must not fall"), (str([1] * 30), "may have 3 steps")):
        with pytest.raises(TaskError, match=said):
            task_of(model, *words, f"task.level_steps={steps}")
    with pytest.raises(TaskError, match="No curriculum"):
        task_of(model, "task.dataset=gsm_symbolic", "task.level_steps=[1]")
