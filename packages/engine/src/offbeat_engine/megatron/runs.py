"""A run of numbers of a flattened weight, as boxes of the weights in the files: the end of a row, whole rows, the beginning of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat_engine.toolkit.state.slices import Region

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from offbeat_engine.megatron.blocks import Block
    from offbeat_engine.toolkit.state.slices import Shape


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


def parts_of(blocks: Sequence[Block], shape: Shape, start: int, stop: int) -> Iterator[Part]:
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


def _boxes(shape: Shape, start: int, stop: int) -> Iterator[Region]:
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
