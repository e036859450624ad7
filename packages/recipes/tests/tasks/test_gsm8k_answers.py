"""Which number an answer says."""

from __future__ import annotations

from decimal import Decimal

import pytest

from offbeat_recipes.tasks.gsm8k import flexible_answer, numbers, strict_answer


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 42", "42", "42"),
        ("thus\n####42", "42", "42"),
        ("#### 1,234", "1234", "1234"),
        ("#### $1,234.50", "1234.50", "1234.50"),
        ("#### -7", "-7", "-7"),
        ("#### -$7", "-7", "-7"),
        ("#### $-7", "-7", "-7"),
        ("#### 42 apples", "42", "42"),
        ("#### 42.", "42", "42"),
        ("#### 50%", "50", "50"),
        ("#### .5", "0.5", "0.5"),
        ("#### 3\n#### 4", "4", "4"),
        ("#### 42\nThat is 6 times 7", "42", "7"),
        ("#### 6 or 7", None, "7"),
        ("#### 1/2", None, "2"),
        ("####", None, None),
        ("#### none", None, None),
        ("The answer is 42.", None, "42"),
        ("16-20 eggs", None, "20"),
        ("x=-20", None, "-20"),
        ("no number", None, None),
        ("", None, None),
    ],
)
def test_extraction(text: str, strict: str | None, flexible: str | None):
    assert strict_answer(text) == (None if strict is None else Decimal(strict))
    assert flexible_answer(text) == (None if flexible is None else Decimal(flexible))


def test_numbers_in_order():
    text = "5-3=2, then $4.50 and 1,000,000 or 12,34 in half-3"
    assert [str(value) for value in numbers(text)] == ["5", "3", "2", "4.50", "1000000", "12", "34", "3"]


def test_equal_numbers_are_equal():
    assert strict_answer("#### 42.0") == strict_answer("#### 42")
    assert strict_answer("#### 42.5") != strict_answer("#### 42")
