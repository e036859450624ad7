"""Sums: determinism, held-out prompts, the exact reward, tokenizer and model folder."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.arithmetic import (
    ALPHABET,
    ArithmeticTask,
    is_right,
    max_answer_tokens,
    worked_answer,
)
from offbeat_recipes.tasks.config import ArithmeticConfig
from offbeat_rollout import Completion, Finish
from offbeat_trainer import Prompt, Trajectory

if TYPE_CHECKING:
    from pathlib import Path


def _trajectory(
    task: ArithmeticTask, text: str, end: bool = True, finish: Finish = Finish.STOP
) -> Trajectory:
    ids = tuple(task.tokenizer(text)["input_ids"]) + (task.stop_token_ids() if end else ())
    zeros = (0,) * len(ids)
    made = Completion.of(request_id="0", token_ids=ids, logprobs=zeros, policy_versions=zeros, finish=finish)
    return Trajectory.of(made)


def _operands(prompt: Prompt) -> tuple[int, int]:
    left, right = prompt.text.removesuffix("=").split("+")
    return int(left), int(right)


@pytest.fixture(scope="module")
def task() -> ArithmeticTask:
    return ArithmeticTask(ArithmeticConfig(level=2), "", seed=0)


@given(st.integers(100, 999), st.integers(100, 999))
def test_a_worked_answer_without_forgetting_is_right(left: int, right: int):
    answer = worked_answer(left, right, forgetful=False)
    assert is_right(answer, left, right)
    for column in re.split("[,;]", answer.split(":")[0]):
        said, *totals = column.split("=")
        assert all(eval(before) == eval(after.split("+")[0]) for before, after in pairwise([said, *totals]))
    assert len(answer) + 1 <= max_answer_tokens(3)


@given(st.integers(10, 99), st.integers(10, 99))
def test_forgetting_hurts_exactly_where_there_is_a_carry(left: int, right: int):
    carries = left % 10 + right % 10 >= 10
    assert is_right(worked_answer(left, right, forgetful=True), left, right) is not carries


def test_worked_example_by_hand():
    assert worked_answer(345, 678, forgetful=False) == "5+8=13,4+7=11+1=12;3+6=9+1=10:1023"
    assert worked_answer(345, 678, forgetful=True) == "5+8=13,4+7=11;3+6=9:913"
    assert max_answer_tokens(3) == len("9+9=18,9+9=18+1=19;9+9=18+1=19:1998") + 1
    assert max_answer_tokens(1) == len("9+9=18:18") + 1


def test_columns_carry_as_often_as_asked():
    task = ArithmeticTask(ArithmeticConfig(level=2, carry_share=0.7), "", seed=0)
    operands = [_operands(prompt) for step in range(40) for prompt in task.prompts(step, 50)]
    share = sum(left % 10 + right % 10 >= 10 for left, right in operands) / len(operands)
    assert 0.65 < share < 0.75


def test_prompts_are_a_function_of_seed_and_step(task: ArithmeticTask):
    again = ArithmeticTask(ArithmeticConfig(level=2), "", seed=0)
    other = ArithmeticTask(ArithmeticConfig(level=2), "", seed=1)
    assert again.prompts(3, 16) == task.prompts(3, 16)
    assert task.prompts(4, 16) != task.prompts(3, 16)
    assert other.prompts(3, 16) != task.prompts(3, 16)
    assert len({prompt.uid for prompt in task.prompts(3, 64)}) == 64
    assert task.examples(3, 8) == again.examples(3, 8)
    assert task.examples(4, 8) != again.examples(3, 8)


def test_held_out_prompts_never_appear_in_training(task: ArithmeticTask):
    held = {frozenset(_operands(prompt)) for prompt in task.validation_prompts(256)}
    assert len(task.validation_prompts(256)) == 256
    trained = {frozenset(_operands(prompt)) for step in range(100) for prompt in task.prompts(step, 64)}
    shown = {
        frozenset(map(int, task.decode(example.prompt_ids).removesuffix("=").split("+")))
        for step in range(100)
        for example in task.examples(step, 64)
    }
    assert not held & (trained | shown)
    assert len(trained) > 1000
    # The seed moves the order, never the border.
    other = ArithmeticTask(ArithmeticConfig(level=2), "", seed=9)
    assert other.validation_prompts(256) == task.validation_prompts(256)


def test_the_share_held_out_is_what_was_asked():
    task = ArithmeticTask(ArithmeticConfig(level=2, held_out_fraction=0.3), "", seed=0)
    pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    held = sum(task.is_held_out(f"{min(pair)}+{max(pair)}") for pair in pairs)
    assert 0.27 < held / 8100 < 0.33


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("5+7=12,2+3=5+1=6:62", 1.0),
        (":62", 1.0),  # the result alone counts
        ("62", 0.0),
        (":63", 0.0),
        (":062", 0.0),
        (":62,", 0.0),
        ("62:", 0.0),
        (":0:62", 0.0),
    ],
)
def test_the_reward_is_exact(task: ArithmeticTask, text: str, reward: float):
    prompt = Prompt(uid="x", text="25+37=", token_ids=(), data={"left": 25, "right": 37})
    score = task.score(prompt, _trajectory(task, text))
    assert (score.reward, score.correct) == (reward, bool(reward))


def test_no_reward_without_an_end(task: ArithmeticTask):
    prompt = Prompt(uid="x", text="25+37=", token_ids=(), data={"left": 25, "right": 37})
    assert task.score(prompt, _trajectory(task, ":62", end=False, finish=Finish.LENGTH)).reward == 0
    assert task.score(prompt, _trajectory(task, ":62", finish=Finish.LENGTH)).reward == 0
    padded = _trajectory(task, ":62<pad>")
    assert task.score(prompt, padded).reward == 0
    assert task.score(prompt, _trajectory(task, "", end=False)).reward == 0


def test_tokenizer_round_trip(task: ArithmeticTask):
    ids = task.tokenizer(ALPHABET)["input_ids"]
    assert len(ids) == len(ALPHABET) == len(set(ids))
    assert task.decode(ids) == ALPHABET
    prompt = task.prompts(0, 1)[0]
    assert tuple(task.tokenizer(prompt.text)["input_ids"]) == prompt.token_ids
    assert len(prompt.token_ids) == task.max_prompt_tokens
    assert task.decode([*prompt.token_ids, *task.stop_token_ids()]) == prompt.text


def test_examples_end(task: ArithmeticTask):
    for example in task.examples(0, 32):
        assert example.completion_ids[-1:] == task.stop_token_ids()
        assert len(example.completion_ids) <= max_answer_tokens(2)


def test_the_folder_is_an_ordinary_model(task: ArithmeticTask, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = torch.random.get_rng_state()
    folder = task.model_folder(tmp_path, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("12+34=")["input_ids"] == task.tokenizer("12+34=")["input_ids"]
    assert tokenizer.decode(tokenizer("12+34=")["input_ids"]) == "12+34="
    assert tokenizer.eos_token_id == task.stop_token_ids()[0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == task.stop_token_ids()[0]
    assert not [name for name in tmp_path.iterdir() if name != folder]  # nothing half-made is left

    again = task.model_folder(tmp_path / "elsewhere", seed=3)
    other = task.model_folder(tmp_path / "elsewhere", seed=4)
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_wide_models_begin_nearly_uniform_and_in_bfloat16_nearly_the_same(tmp_path: Path):
    """With weights as large as the usual small one's, a wide one magnifies each rounding from layer to layer."""
    import torch
    from transformers import AutoModelForCausalLM

    assert ArithmeticTask(ArithmeticConfig(level=2), "", seed=0).shape.initializer_range == 0.1
    wide = ArithmeticConfig(level=2, hidden_size=384, num_layers=8, num_heads=12, intermediate_size=768)
    model = AutoModelForCausalLM.from_pretrained(
        ArithmeticTask(wide, "", seed=0).model_folder(tmp_path, seed=0), dtype=torch.float32
    )
    ids_BT = torch.randint(3, 3 + len(ALPHABET), (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(ids_BT).logits.log_softmax(-1)
        rounded = model.bfloat16()(ids_BT).logits.float().log_softmax(-1)
    taken = exact[:, :-1].gather(2, ids_BT[:, 1:, None])
    assert -float(taken.mean()) < math.log(exact.shape[-1]) + 0.75
    assert float((exact - rounded).abs().mean()) < 0.05


def test_a_named_model_is_used_if_it_speaks_the_same(task: ArithmeticTask, tmp_path: Path):
    folder = task.model_folder(tmp_path, seed=0)
    assert ArithmeticTask(ArithmeticConfig(), str(folder), 0).model_folder(tmp_path / "no", seed=0) == folder
    assert not (tmp_path / "no").exists()
    with pytest.raises(TaskError, match=r"model\.path"):
        ArithmeticTask(ArithmeticConfig(), str(tmp_path), 0).model_folder(tmp_path, seed=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ArithmeticConfig(level=6), "1 to 5"),
        (ArithmeticConfig(held_out_fraction=0.0), "held_out_fraction"),
        (ArithmeticConfig(hidden_size=51), "multiple"),
        (ArithmeticConfig(level=1, held_out_fraction=0.02), "leaves none of 45 sums for validation"),
    ],
)
def test_settings_that_cannot_be(config: ArithmeticConfig, message: str):
    with pytest.raises(TaskError, match=message):
        ArithmeticTask(config, "", seed=0)


def test_prompts_that_are_not_to_be_had_are_not_looked_for_for_ever():
    task = ArithmeticTask(
        ArithmeticConfig(level=1, held_out_fraction=0.03), "", seed=0
    )  # its estimate says one
    with pytest.raises(TaskError, match="has not 1 different prompts held out"):
        task.validation_prompts(1)


def test_a_validation_by_more_prompts_than_there_are_takes_those_that_are_soon_found(task: ArithmeticTask):
    assert len({prompt.uid for prompt in task.validation_prompts(512)}) == 307


def test_more_prompts_than_there_are():
    with pytest.raises(TaskError, match="has not 64 different prompts for training"):
        ArithmeticTask(ArithmeticConfig(level=1), "", seed=0).prompts(0, 64)
