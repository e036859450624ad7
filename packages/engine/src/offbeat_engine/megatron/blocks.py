"""Which part of which weight of the files lies where in a weight of Megatron's: rectangles, on both sides.

Every cut of the tables comes to such blocks, and no more: by them weights are read, leave, and go into checkpoints, and
gradients and moments with them, since they move elements and never mix them. A rank's share of moments is a run of numbers of a
flattened weight, which comes to boxes, too: the end of a row, whole rows, the beginning of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat_engine.megatron.families import Cut, names, whole_shapes
from offbeat_engine.toolkit.state.slices import Region

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from offbeat_engine.megatron.families import Entry, Shape

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """`sizes` elements of the file's weight `name` (of `shape`) from `offsets` on, which lie from `start` on in ours."""

    name: str
    shape: Numbers
    offsets: Numbers
    sizes: Numbers
    start: Numbers

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this block of Megatron's `tensor`, a view."""
        return tensor[tuple(slice(at, at + size) for at, size in zip(self.start, self.sizes, strict=True))]


@dataclass(frozen=True, slots=True)
class Among:
    """This rank's place among the `size` ranks that share a tensor."""

    rank: int
    size: int


def blocks_of(
    entry: Entry, layer: int | None, expert: int | None, shape: Shape, tensor: Among
) -> list[Block]:
    """Return the blocks of one weight on the rank `tensor.rank` of its tensor."""
    called = list(zip(names(entry, layer, expert), whole_shapes(entry, shape), strict=True))
    match entry.cut:
        case Cut.COPY:
            name, whole = called[0]
            return [_rows(name, whole, 0, whole[0], 0)]
        case Cut.VOCAB:
            name, whole = called[0]
            first, num_rows = vocab_rows(whole[0], tensor)
            return [_rows(name, whole, first, num_rows, 0)] if num_rows else []
        case Cut.ROW:
            name, whole = called[0]
            share = whole[1] // tensor.size
            return [Block(name, whole, (0, tensor.rank * share), (whole[0], share), (0, 0))]
        case Cut.GLU:
            share = called[0][1][0] // tensor.size
            return [
                _rows(name, whole, tensor.rank * share, share, half * share)
                for half, (name, whole) in enumerate(called)
            ]
        case Cut.QKV:
            return _qkv(called, shape, tensor)


def _qkv(called: list[tuple[str, Numbers]], shape: Shape, tensor: Among) -> list[Block]:
    num_groups = shape.num_groups // tensor.size
    heads = shape.num_heads // shape.num_groups
    blocks: list[Block] = []
    place = 0
    for group in range(tensor.rank * num_groups, (tensor.rank + 1) * num_groups):
        for (name, whole), num_heads in zip(called, (heads, 1, 1), strict=True):
            num_rows = num_heads * shape.head_dim
            blocks.append(_rows(name, whole, group * num_rows, num_rows, place))
            place += num_rows
    return blocks


def _rows(name: str, whole: Numbers, first: int, num_rows: int, place: int) -> Block:
    rest = whole[1:]
    zeros = (0,) * len(rest)
    return Block(name, whole, (first, *zeros), (num_rows, *rest), (place, *zeros))


def padded_vocab(vocab: int, tensor_size: int) -> int:
    """Return how many rows the vocabulary has where `tensor_size` ranks have as many each."""
    return -(-vocab // tensor_size) * tensor_size


def vocab_rows(vocab: int, tensor: Among) -> tuple[int, int]:
    """Return the first token of a rank, and how many it has that are none to fill up."""
    share = padded_vocab(vocab, tensor.size) // tensor.size
    first = tensor.rank * share
    return first, max(0, min(share, vocab - first))


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the weight `block.name`, at `region`, and where its numbers lie in a rank's run of a flattened weight."""

    block: Block
    region: Region
    first: int
    width: int
    columns: slice

    def of(self, run: torch.Tensor) -> torch.Tensor:
        """Return the numbers in a run, a view."""
        if len(self.region.shape) == 1:
            return run[self.first : self.first + self.region.numel]
        num_rows = self.region.shape[0]
        return run[self.first : self.first + num_rows * self.width].view(num_rows, self.width)[
            :, self.columns
        ]


def parts_of(blocks: Sequence[Block], shape: Numbers, start: int, stop: int) -> Iterator[Part]:
    """Yield what the numbers `start` to `stop` of a flattened weight of `shape` are of its `blocks`."""
    for box in _boxes(shape, start, stop):
        for block in blocks:
            common = box.common(Region(block.start, block.sizes))
            if common is None:
                continue
            offsets = tuple(
                file + here - there
                for file, here, there in zip(block.offsets, common.offsets, block.start, strict=True)
            )
            row, width = (common.offsets[0], box.shape[1]) if len(shape) > 1 else (0, 1)
            first = (row * shape[1] + box.offsets[1] if len(shape) > 1 else common.offsets[0]) - start
            columns = common.within(box)[-1]
            yield Part(block, Region(offsets, common.shape), first, width, columns)


def _boxes(shape: Numbers, start: int, stop: int) -> Iterator[Region]:
    """Yield the boxes that a run of a flattened tensor consists of."""
    if len(shape) == 1:
        yield Region((start,), (stop - start,))
        return
    width = shape[1]
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            size = min(width - column, stop - start)
            yield Region((row, column), (1, size))
        else:
            num_rows = (stop - start) // width
            size = num_rows * width
            yield Region((row, 0), (num_rows, width))
        start += size
