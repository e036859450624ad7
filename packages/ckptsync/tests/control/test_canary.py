from __future__ import annotations

import pytest

from offbeat_ckptsync.control.sync import odd_ones


@pytest.mark.parametrize(
    ("answers", "reference", "odd"),
    [
        ({}, (), set()),
        ({"a": [1.0]}, (), set()),
        ({"a": [1.0, 2.0], "b": [1.0, 2.05]}, (), set()),
        ({"a": [1.0, 2.0], "b": [1.0, 3.0]}, (), {"a", "b"}),
        ({"a": [1.0, 2.0], "b": [1.0, 3.0], "c": [1.01, 2.0]}, (), {"b"}),
        ({"a": [1.0, 2.0], "b": [1.0, 3.0]}, (1.0, 3.0), {"a"}),
        ({"a": [1.0, 2.0], "b": [], "c": [1.0, 2.0]}, (), set()),
        ({"a": [1.0, 2.0], "b": [1.0], "c": [1.0, 2.0]}, (), {"b"}),
        ({"a": [1.0], "b": [float("nan")]}, (), {"b"}),
        ({"a": [float("inf")]}, (), {"a"}),
        ({"a": [1.0], "b": [1.0, 2.0]}, (), {"a", "b"}),
        ({"a": [1.0], "b": [2.0]}, (float("nan"),), {"a", "b"}),
        ({"a": [1.0], "b": [1.0]}, (float("nan"),), set()),
    ],
)
def test_the_odd_ones_are_those_far_from_what_is_right(answers, reference, odd):
    assert odd_ones(answers, tolerance=0.1, reference=reference).keys() == odd
