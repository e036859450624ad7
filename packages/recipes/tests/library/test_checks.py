"""Rewards that a row's columns decide."""

import pytest

from offbeat_recipes.library.checks import ends_with, exact, matches, mathematics, valid_json
from offbeat_trainer.rollouts.scorer import find_reward


def test_text():
    assert exact(" 12\n", "12")
    assert exact("12", 12)
    assert not exact("12.", "12")
    assert ends_with("So it is 12.", "12")
    assert not ends_with("", "12")
    assert matches("call me at 555-1234", r"\d{3}-\d{4}$")
    assert not matches("none", r"\d")


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (r"Thus $x = \frac{1}{2}$", "0.5", True),
        (r"The answer is \boxed{\frac{2}{4}}", r"\frac{1}{2}", True),
        ("It is 41, no, it is 42", 42, True),
        ("It is 41", 42, False),
        ("nothing to be read", "1", False),
        (r"$\{1, 2\}$", r"\{2, 1\}", True),
    ],
)
def test_formulas_by_what_they_are_worth(completion, answer, right):
    assert mathematics(completion, answer) is right


def test_json_by_its_schema():
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    assert valid_json('{"age": 3}', schema)
    assert valid_json('Here:\n```json\n{"age": 3}\n```', '{"required": ["age"]}')
    assert not valid_json('{"age": "3"}', schema)
    assert not valid_json("age: 3", schema)


@pytest.mark.parametrize(
    ("name", "column"),
    [("exact", "answer"), ("mathematics", "answer"), ("matches", "pattern"), ("valid_json", "schema")],
)
def test_each_is_a_reward_of_a_run(name, column):
    assert find_reward(f"offbeat_recipes.library.checks:{name}", 1.0, {column: ""}).wants == {
        "completion",
        column,
    }
