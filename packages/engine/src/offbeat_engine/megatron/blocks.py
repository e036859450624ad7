"""Which part of which weight of the files lies where in a weight of Megatron's: rectangles, on both sides.

Every cut of the tables comes to such blocks, and no more: by them weights are read, leave, and go into checkpoints, and
gradients and moments with them, since they move elements and never mix them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat_engine.megatron.families import Cut, names, whole_shapes

if TYPE_CHECKING:
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
            share = shape.ffn // tensor.size
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
