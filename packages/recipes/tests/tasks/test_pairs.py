"""Pairs of completions from rows: what they become, and rows that are none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.errors import DataError, TaskError
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.planning.plan import plan_run
from offbeat_recipes.tasks.base import make_scorer, make_task
from offbeat_recipes.tasks.config import PairsConfig
from offbeat_recipes.tasks.file import PairsTask
from offbeat_trainer import RewardConfig

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [{"prompt": f"say {word}", "chosen": word, "rejected": word[:-1]} for word in ("yes", "no", "maybe")]


def said(content: str, role: str = "assistant") -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _task(tmp_path: Path, rows: list[dict[str, Any]], model: str, **more: Any) -> PairsTask:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = make_task(PairsConfig(train_path=str(path), validation_path=str(path), **more), model, 0)
    assert isinstance(made, PairsTask)
    return made


def test_a_row_is_a_prompt_and_two_completions_that_end(tmp_path: Path, plain_model: str):
    task = _task(tmp_path, ROWS, plain_model)
    end = task.stop_token_ids()[0]
    for row, pair in zip(ROWS, task.validation_pairs(3), strict=True):
        assert task.decode(pair.prompt_ids) == row["prompt"]
        assert (task.decode(pair.chosen_ids), task.decode(pair.rejected_ids)) == (
            row["chosen"],
            row["rejected"],
        )
        assert pair.chosen_ids[-1] == pair.rejected_ids[-1] == end
    drawn = [task.decode(pair.chosen_ids) for step in range(3) for pair in task.pairs(step, 1)]
    assert sorted(drawn) == ["maybe", "no", "yes"]
    assert task.pairs(1, 1) == task.pairs(1, 1)
    assert task.decode(task.validation_examples(1)[0].completion_ids) == "yes"


def test_an_epoch_of_single_verdicts_has_both_completions_of_each_pair_once(tmp_path: Path, plain_model: str):
    task = _task(tmp_path, ROWS, plain_model)
    drawn = [
        (task.decode(one.prompt_ids), task.decode(one.completion_ids), one.desirable)
        for step in range(3)
        for one in task.labelled(step, 2)
    ]
    wanted = [(row["prompt"], row[key], key == "chosen") for row in ROWS for key in ("chosen", "rejected")]
    assert sorted(drawn) == sorted(wanted)
    assert task.labelled(1, 2) == task.labelled(1, 2)
    held_out = [(task.decode(one.completion_ids), one.desirable) for one in task.validation_labelled(2)]
    assert held_out == [("yes", True), ("no", True), ("ye", False), ("n", False)]


def test_messages_are_templated_and_completions_are_one_of_the_assistant(tmp_path: Path, chat_model: str):
    row = {"prompt": said("hi", "user"), "chosen": said("hello"), "rejected": said("go away")}
    pair = _task(tmp_path, [row], chat_model).validation_pairs(1)[0]
    task = _task(tmp_path, [row], chat_model)
    assert task.decode(pair.prompt_ids) == "[user]hi[assistant]"
    assert (task.decode(pair.chosen_ids), task.decode(pair.rejected_ids)) == ("hello", "go away")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "row 2: no 'rejected'; it has chosen, prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "row 2: 'chosen' and 'rejected' are the same"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "row 2: 'chosen' must be text"),
        ({"prompt": "a", "chosen": 5, "rejected": "b"}, "row 2: 'chosen' must be text or a list of"),
        (
            {"prompt": "a", "chosen": said("a", "user") + said("b"), "rejected": "b"},
            "one message of the assistant",
        ),
        ({"prompt": "a", "chosen": said("b", "user"), "rejected": "b"}, "one message of the assistant"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "row 2: 'prompt' must be text"),
    ],
)
def test_rows_that_are_no_pairs_are_named(
    tmp_path: Path, plain_model: str, row: dict[str, Any], message: str
):
    with pytest.raises(DataError) as caught:
        _task(tmp_path, [ROWS[0], row], plain_model)
    assert message in str(caught.value)


def test_pairs_have_no_reward(tmp_path: Path, plain_model: str):
    with pytest.raises(TaskError, match="which of two completions is better"):
        make_scorer(_task(tmp_path, ROWS, plain_model), RewardConfig(), tmp_path / "rewards.log")


def _refused(*settings: str) -> dict[str, str]:
    config = compose_run(settings)
    return {item.setting: item.reason for item in plan_run(config, gather_facts(config)).refusals}


def test_the_plan_knows_who_learns_from_pairs():
    assert "takes rewards" in _refused("task=pairs")["algorithm"]
    for name, reads in (("dpo", "pairs"), ("simpo", "pairs"), ("kto", "labelled"), ("reward_model", "pairs")):
        assert _refused(f"algorithm={name}")["task"] == f"{name} learns from {reads}, and arithmetic has none"


def test_the_plan_knows_a_reward_model_that_is_not_there_and_takes_pairs_for_one_that_is(tmp_path: Path):
    assert (
        _refused("task=pairs", f"reward.model={tmp_path}")["reward.model"]
        == f"{tmp_path} holds no config.json"
    )
    (tmp_path / "config.json").write_text("{}")
    assert not {"algorithm", "reward.model"} & _refused("task=pairs", f"reward.model={tmp_path}").keys()


def test_the_plan_of_pairs_has_no_replicas_and_keeps_pairs_whole(tmp_path: Path):
    base = [
        "task=pairs",
        "algorithm=dpo",
        "rollout.num_replicas=9",
        "trainer.prompts_per_step=6",
        "mode=fully_async",
    ]
    config = compose_run(base)
    plan = plan_run(config, gather_facts(config))
    assert [one.process for one in plan.placement] == ["driver", "training rank 0 (fsdp2)"]
    assert (plan.batch.completions_per_step, plan.batch.group_size) == (12, 2)
    assert {item.setting for item in plan.refusals} == {
        "task.train_path",
        "task.validation_path",
        "model.path",
    }
    assert "trainer.updates_per_step" in _refused(*base, "trainer.updates_per_step=4")
