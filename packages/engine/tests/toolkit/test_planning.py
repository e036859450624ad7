from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_engine import BatchError, plan_micro_batches, plan_shards
from offbeat_engine.toolkit.step.planning import check_whole, plan_length_classes

LENGTHS = st.lists(st.integers(0, 300), max_size=60)


def cost(lengths, indices, padded):
    own = [lengths[index] for index in indices]
    return len(own) * max(own) if padded else sum(own)


@given(LENGTHS, st.integers(1, 400), st.booleans())
def test_every_sequence_is_in_one_micro_batch_and_the_budget_is_kept(lengths, max_tokens, padded):
    plan = plan_micro_batches(lengths, max_tokens=max_tokens, padded=padded)
    assert sorted(index for part in plan for index in part) == list(range(len(lengths)))
    for part in plan:
        assert part
        assert cost(lengths, part, padded) <= max_tokens or max(lengths[i] for i in part) > max_tokens
        if cost(lengths, part, padded) > max_tokens:
            assert sum(lengths[i] > 0 for i in part) == 1 or padded
            assert len([i for i in part if lengths[i]]) == 1
    assert plan == plan_micro_batches(lengths, max_tokens=max_tokens, padded=padded)


@given(LENGTHS, st.integers(1, 400))
def test_no_two_neighbouring_micro_batches_would_fit_in_one(lengths, max_tokens):
    plan = plan_micro_batches(lengths, max_tokens=max_tokens)
    for left, right in pairwise(plan):
        assert cost(lengths, left, False) + lengths[right[0]] > max_tokens


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        plan_micro_batches([1], max_tokens=0)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20)), max_size=60),
    st.integers(1, 400),
    st.booleans(),
)
def test_units_are_in_one_micro_batch_and_the_budget_is_kept_but_for_a_unit_beyond_it(
    pairs, max_tokens, padded
):
    lengths, units = [length for length, _ in pairs], [unit for _, unit in pairs]
    plan = plan_micro_batches(lengths, max_tokens=max_tokens, padded=padded, units=units)
    assert sorted(index for part in plan for index in part) == list(range(len(pairs)))
    homes = [{units[index] for index in part} for part in plan]
    assert sum(map(len, homes)) == len(set(units))
    assert all(
        cost(lengths, part, padded) <= max_tokens or len(home) == 1
        for part, home in zip(plan, homes, strict=True)
    )
    check_whole(units, plan)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20)), max_size=60), st.integers(1, 9))
def test_units_are_of_one_shard(pairs, num_ranks):
    lengths, units = [length for length, _ in pairs], [unit for _, unit in pairs]
    shards = plan_shards(lengths, num_ranks, units=units)
    assert sorted(index for shard in shards for index in shard) == list(range(len(pairs)))
    assert sum(len({units[index] for index in shard}) for shard in shards) == len(set(units))
    loads = [sum(lengths[index] for index in shard) for shard in shards]
    heaviest = max((sum(n for n, unit in pairs if unit == one) for one in set(units)), default=0)
    assert max(loads) - min(loads) <= heaviest


def test_a_parted_unit_is_found():
    with pytest.raises(BatchError, match="micro-batches 0 and 1 part the sequences of unit 5"):
        check_whole([5, 6, 5], [[0, 1], [2]])


@given(LENGTHS, st.integers(1, 9))
def test_shards_hold_every_sequence_once_and_differ_by_at_most_the_longest(lengths, num_ranks):
    shards = plan_shards(lengths, num_ranks)
    assert len(shards) == num_ranks
    assert sorted(index for shard in shards for index in shard) == list(range(len(lengths)))
    assert all(shard == sorted(shard) for shard in shards)
    loads = [sum(lengths[index] for index in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_shards_of_equal_sequences_have_equally_many():
    assert [len(shard) for shard in plan_shards([7] * 10, 3)] == [4, 3, 3]


@given(LENGTHS)
def test_length_classes_hold_every_sequence_with_tokens_and_pad_by_less_than_the_ratio(lengths):
    classes = plan_length_classes(lengths, ratio=1.5)
    members = sorted(index for group in classes for index in group)
    assert members == [index for index, length in enumerate(lengths) if length]
    for group in classes:
        own = [lengths[index] for index in group]
        assert own[0] == max(own)
        assert min(own) * 1.5 > max(own)
