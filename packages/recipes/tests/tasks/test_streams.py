"""Streams and epochs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_recipes.tasks.rows import Stream, epoch_indices, stream


def test_streams_differ_by_seed_purpose_and_step():
    drawn = {
        tuple(stream(seed, purpose, step).integers(0, 1 << 30, 4))
        for seed in (0, 1)
        for purpose in Stream
        for step in (0, 1)
    }
    assert len(drawn) == 2 * len(Stream) * 2


@given(st.integers(1, 40), st.data())
def test_an_epoch_holds_each_row_at_most_once(num_rows: int, data: st.DataObject):
    taken = data.draw(st.integers(1, num_rows))
    per_epoch = num_rows // taken
    for epoch in range(3):
        rows = [
            row
            for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)
            for row in epoch_indices(num_rows, step, taken, 5, Stream.PROMPTS)
        ]
        assert len(rows) == len(set(rows)) == per_epoch * taken
        assert set(rows) <= set(range(num_rows))


def test_epochs_differ():
    assert epoch_indices(50, 0, 50, 0, Stream.PROMPTS) != epoch_indices(50, 1, 50, 0, Stream.PROMPTS)


def test_more_than_there_is():
    with pytest.raises(ValueError, match="takes 5 rows, and there are 4"):
        epoch_indices(4, 0, 5, 0, Stream.PROMPTS)
