"""Joining must not depend on how values were grouped: ranks, mini-batches and steps are joined in any nesting."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_trainer.data.metrics import Last, Max, Mean, Metric, Sum, reduce_metrics

# Whole numbers keep sums exact, so that equality is the claim and not closeness.
numbers = st.integers(-(2**40), 2**40).map(float)
reductions = st.one_of(
    st.lists(st.builds(Mean, numbers, st.integers(0, 2**20).map(float)), min_size=3, max_size=3),
    *(st.lists(st.builds(kind, numbers), min_size=3, max_size=3) for kind in (Sum, Max, Last)),
)


@given(reductions)
def test_join_is_associative(three):
    a, b, c = three
    assert a.join(b).join(c) == a.join(b.join(c))


@given(st.lists(st.tuples(numbers, st.integers(1, 9)), min_size=1))
def test_each_kind_against_the_plain_computation(drawn):
    values = [value for value, _ in drawn]
    metrics = [
        metric
        for value, weight in drawn
        for metric in (
            Metric("d/last", Last(value)),
            Metric("c/max", Max(value)),
            Metric("b/sum", Sum(value)),
            Metric("a/mean", Mean(value * weight, weight)),
        )
    ]
    reduced = reduce_metrics(metrics)
    assert list(reduced) == ["a/mean", "b/sum", "c/max", "d/last"]
    assert reduced["a/mean"] == sum(v * w for v, w in drawn) / sum(w for _, w in drawn)
    assert reduced["b/sum"] == sum(values)
    assert reduced["c/max"] == max(values)
    assert reduced["d/last"] == values[-1]


def test_a_mean_of_nothing_is_not_a_number():
    assert math.isnan(Mean(0.0, 0.0).value())
    assert Mean(0.0, 0.0).join(Mean(3.0)).value() == 3.0


@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0), (1.0, math.nan, 2.0)])
def test_a_maximum_with_what_is_no_number_is_none_wherever_that_stands(values):
    assert math.isnan(reduce_metrics([Metric("ratio", Max(one)) for one in values])["ratio"])


@pytest.mark.parametrize("other", [Sum(1.0), Max(1.0), Last(1.0)])
def test_one_key_with_two_kinds_is_refused_by_name(other):
    with pytest.raises(TypeError, match=f"'loss' came as Mean and as {type(other).__name__}"):
        reduce_metrics([Metric("loss", Mean(1.0)), Metric("loss", other)])
    with pytest.raises(AssertionError):
        Mean(1.0).join(other)
    assert reduce_metrics([]) == {}
