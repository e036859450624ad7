"""The calculator: what it shows, what is right, and worked examples that its own environment calls right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.errors import TaskError
from offbeat_recipes.planning.facts import gather_facts
from offbeat_recipes.planning.plan import plan_run
from offbeat_recipes.run.modes import after_turn, observation_encoder
from offbeat_recipes.tasks.calculator import (
    Calculator,
    CalculatorTask,
    shown,
)
from offbeat_recipes.tasks.config import CalculatorConfig
from offbeat_trainer import Action
from offbeat_trainer.data.assemble import assemble_examples
from offbeat_trainer.testing import check_environment

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("call", "shows"),
    [
        ("47*86", "4042"), ("4042+29", "4071"), ("10+10", "0020"), ("99*99", "9801"), ("9999+1", "????"),
        ("47*", "????"), ("", "????"), ("1+2+3", "????"), ("7-3", "????"), (" 1+1", "????"),
    ],
)  # fmt: skip
def test_what_it_shows(call: str, shows: str):
    assert shown(call) == shows


def _act(task: CalculatorTask, uid: int, texts: list[str], finish: str = "stop") -> list[Any]:
    environment = Calculator()
    assert environment.reset(task.validation_prompts(uid + 1)[uid], 0) == ""
    return [
        environment.step(Action(turn=place, text=text, token_ids=(), finish=finish))
        for place, text in enumerate(texts)
    ]


def test_worked_examples_are_right_and_guesses_are_not():
    task = CalculatorTask(CalculatorConfig(careless=0.5), "", 0)
    examples = task.examples(0, 200)
    lengths = {len(example.completion_ids) for example in examples}
    assert lengths == {6, task.max_answer_tokens}, "a guess, or two calls and a result"
    assert {len(example.prompt_ids) for example in examples} == {task.max_prompt_tokens}
    for example in examples:
        said = "".join(
            task.decode([token])
            for token, own in zip(example.completion_ids, example.trained, strict=True)
            if own
        )
        heard = "".join(
            task.decode([token])
            for token, own in zip(example.completion_ids, example.trained, strict=True)
            if not own
        )
        problem = task.decode(example.prompt_ids).rstrip("=")
        if heard:
            first, _, result = heard.partition(";")
            assert first == shown(problem[:5])
            assert said == f"{problem[:5]}{first}{problem[5:]}:{result.rstrip(';')}"
    batch = assemble_examples(examples)
    assert int(batch["loss_mask"].sum()) == sum(sum(example.trained) for example in examples)
    assert not batch["loss_mask"][:, : task.max_prompt_tokens].any()


def test_the_result_alone_decides():
    task = CalculatorTask(CalculatorConfig(), "", 0)
    prompt = task.validation_prompts(1)[0]
    answer = str(prompt.data["answer"])
    asked = _act(task, 0, [prompt.text[:5], f":{answer}"])
    assert asked[0].observation == f"{shown(prompt.text[:5])};"
    assert (asked[0].reward, asked[0].done, asked[1].reward, asked[1].correct, asked[1].done) == (
        0, False, 1.0, True, True,
    )  # fmt: skip
    for wrong in (":", ":0000", f":{answer}0", f":{answer}:", f"::{answer}"):
        [told] = _act(task, 0, [wrong])
        assert (told.reward, told.correct, told.done) == (0.0, False, True)
    [cut] = _act(task, 0, [f":{answer}"], finish="length")
    assert (cut.reward, cut.correct) == (0.0, False)


async def test_it_keeps_the_contract_of_environments():
    task = CalculatorTask(CalculatorConfig(), "", 0)
    told = await check_environment(Calculator, task.validation_prompts(1)[0], ["1+1", "x", ":0002"])
    assert [one.observation for one in told] == ["0002;", "????;", ""]


def test_held_out_problems_are_never_trained_and_prompts_depend_on_seed_and_step_alone():
    one, same, other = (CalculatorTask(CalculatorConfig(), "", seed) for seed in (0, 0, 1))
    held = {prompt.uid for prompt in one.validation_prompts(50)}
    trained = {prompt.uid for step in range(20) for prompt in one.prompts(step, 16)}
    assert not held & trained
    assert [p.uid for p in one.prompts(3, 8)] == [p.uid for p in same.prompts(3, 8)]
    assert [p.uid for p in one.prompts(3, 8)] != [p.uid for p in other.prompts(3, 8)]
    assert {p.uid for p in other.validation_prompts(50)} == held
    with pytest.raises(TaskError, match=r"task\.held_out_fraction"):
        CalculatorTask(CalculatorConfig(held_out_fraction=0.0), "", 0)


def test_the_recipe_can_run_and_its_limits_are_refused_by_name():
    config = compose_run(["task=calculator", "rollout=hf"])
    assert config.turns is not None
    assert plan_run(config, gather_facts(config)).refusals == ()

    def refused(*settings: str) -> list[str]:
        given = compose_run(["task=calculator", "rollout=hf", *settings])
        plan = plan_run(given, gather_facts(given))
        return [f"{one.setting}: {one.reason}; {one.remedy}" for one in plan.refusals]

    [long] = refused("environment.max_tokens=56")
    assert long.startswith("rollout.max_model_len: 9 prompt tokens + 56 turn tokens are more than 64")
    assert long.endswith("or lower environment.max_tokens")
    [path] = refused("environment.path=nowhere.py:Own")
    assert path.startswith("environment.path: cannot import 'nowhere.py'")
    short = compose_run(["task=calculator", "rollout=hf", "environment.max_tokens=20"])
    assert any(
        "environment.max_tokens=20 cuts off right answers" in one
        for one in plan_run(short, gather_facts(short)).warnings
    )


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}<eos>;{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def test_messages_become_what_the_template_writes_after_a_turn(tmp_path: Path):
    tokenizer = CalculatorTask(CalculatorConfig(), "", 0).tokenizer
    said, end = [{"role": "tool", "content": "4"}], tokenizer.eos_token_id
    with pytest.raises(TaskError, match="has no chat template; say text"):
        after_turn(tokenizer, said, end)
    tokenizer.chat_template = TEMPLATE
    rest = ";4<eos>;="
    assert tokenizer.decode(after_turn(tokenizer, said, end)) == rest
    [semicolon] = tokenizer(";", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(after_turn(tokenizer, said, semicolon)) == "<eos>" + rest, (
        "a stop text ended the turn"
    )
    with pytest.raises(
        TaskError, match="`reset` returned messages, and the prompt already opens the assistant's turn"
    ):
        observation_encoder(tokenizer)(said, None)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(TaskError, match="does not write an assistant's turn as it is"):
        after_turn(tokenizer, said, end)
    tokenizer.chat_template = None
    encode = observation_encoder(tokenizer)
    assert encode("", None) == []
    assert encode([5, 6], end) == [5, 6]
    assert tokenizer.decode(encode("4042;", end)) == "4042;"
