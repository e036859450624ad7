"""Regions of tensors, and what is said of them: against a tensor that is painted piece by piece."""

import json
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat_engine import CheckpointError
from offbeat_engine.toolkit.state.slices import Described, Region, check_fit, merge, read_index, said_of


def described(shape, *pieces, dtype=torch.float32):
    return Described(
        shape=shape,
        dtype=dtype,
        pieces=tuple(sorted((Region(*piece), f"rank_{n}_0.safetensors") for n, piece in enumerate(pieces))),
    )


def painted(shape, pieces):
    canvas = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in pieces:
        canvas[Region(offsets, sizes).within(Region.whole(shape))] += 1
    return canvas


@st.composite
def cuts(draw):
    """A shape and boxes in it: a grid, of which some boxes may be left out, moved or doubled."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    boxes = [((), ())]
    for size in shape:
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        ranges = [(start, stop - start) for start, stop in pairwise(edges)]
        boxes = [((*o, start), (*s, length)) for o, s in boxes for start, length in ranges]
    change = draw(st.sampled_from(["none", "without", "twice", "moved"]))
    number = draw(st.integers(0, len(boxes) - 1))
    if change == "without":
        del boxes[number]
    elif change == "twice":
        boxes.append(boxes[number])
    elif change == "moved" and shape:
        offsets, sizes = boxes[number]
        moved = draw(st.integers(0, shape[0] - sizes[0]))
        boxes[number] = ((moved, *offsets[1:]), sizes)
    return shape, boxes


@given(cuts())
def test_whole_is_what_holds_every_number_once(cut):
    shape, boxes = cut
    if bool((painted(shape, boxes) == 1).all()):
        described(shape, *boxes).check("x")
    else:
        with pytest.raises(CheckpointError, match=r"`x` (has numbers twice|should have \d+ numbers)"):
            described(shape, *boxes).check("x")


@given(st.data())
def test_what_two_regions_share(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    regions = []
    for _ in range(2):
        starts = tuple(data.draw(st.integers(0, size)) for size in shape)
        regions.append(
            Region(
                starts,
                tuple(data.draw(st.integers(0, size - s)) for s, size in zip(starts, shape, strict=True)),
            )
        )
    both = [painted(shape, [(region.offsets, region.shape)]) for region in regions]
    common = regions[0].common(regions[1])
    expected = both[0] * both[1]
    if common is None:
        assert not expected.any()
    else:
        assert torch.equal(painted(shape, [(common.offsets, common.shape)]), expected)
        assert common.numel == prod(common.shape) > 0


def test_what_is_missing_twice_or_outside_is_named():
    with pytest.raises(CheckpointError, match=r"`x` should have 8 numbers \[4, 2\], and only 6 were written"):
        described((4, 2), ((0, 0), (2, 2)), ((2, 0), (1, 2))).check("x")
    with pytest.raises(CheckpointError, match=r"at \[0:2, 0:2\] in rank_0.*, and at \[1:3, 1:2\] in rank_1"):
        described((4, 2), ((0, 0), (2, 2)), ((1, 1), (2, 1))).check("x")
    with pytest.raises(CheckpointError, match=r"a piece of it at \[3:5, 0:2\], which is outside"):
        described((4, 2), ((3, 0), (2, 2))).check("x")


def test_parts_of_ranks_come_together_and_must_agree():
    upper = said_of({"x": described((4,), ((0,), (3,)))})
    lower = json.loads(json.dumps(said_of({"x": described((4,), ((3,), (1,)))})))
    whole = merge([lower, upper], "here")
    assert [region.offsets for region, _ in whole["x"].pieces] == [(0,), (3,)]
    assert read_index(json.loads(json.dumps(said_of(whole))), "here") == whole
    with pytest.raises(CheckpointError, match=r"`x` has numbers twice"):
        merge([upper, upper], "here")
    with pytest.raises(CheckpointError, match=r"`x` should have 4 numbers \[4\], and only 3 were written"):
        merge([upper], "here")
    other = said_of({"x": described((4,), ((3,), (1,)), dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=r"`x` is torch.float32 \[4\] on one rank and torch.bfloat16"):
        merge([upper, other], "here")


@pytest.mark.parametrize(
    "said",
    [
        {"x": 3},
        {"x": {"shape": [1], "dtype": "float32"}},
        {"x": {"shape": [1], "dtype": "load", "pieces": []}},
        {"x": {"shape": [-1], "dtype": "float32", "pieces": []}},
        {"x": {"shape": [True], "dtype": "float32", "pieces": []}},
        {"x": {"shape": [2], "dtype": "float32", "pieces": [["f", [0], [1, 1]]]}},
        {"x": {"shape": [2], "dtype": "float32", "pieces": [["f", [0]]]}},
    ],
)
def test_rubbish_is_no_traceback(said):
    with pytest.raises(CheckpointError, match="here should say shape, dtype and pieces of each tensor"):
        read_index(said, "here")


def test_what_does_not_fit_is_named():
    index = {"x": described((2,), ((0,), (2,)))}
    check_fit(index, {"x": ((2,), torch.float32)}, "here")
    for wanted, match in (
        ({"y": ((2,), torch.float32)}, r"`y` should be \[2\], got nothing"),
        ({"x": ((3,), torch.float32)}, r"`x` should be \[3\], got \[2\]"),
        ({"x": ((2,), torch.bfloat16)}, r"`x` should be torch.bfloat16, got torch.float32"),
    ):
        with pytest.raises(CheckpointError, match=f"here does not fit the model: {match}"):
            check_fit(index, wanted, "here")
