"""Weights on their way out, under their names in the files: one at a time, for all ranks or some, whole or in pieces.

Who speaks for which weights the ranks tell each other once; which blocks that are follows from the tables. A whole weight is made of what its holders send: nothing is added up,
so bits stay as they are, and nobody holds more than one weight beyond its own.
"""

# torch's distributed functions are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from offbeat_engine.megatron import families
from offbeat_engine.megatron.blocks import Among, blocks_of
from offbeat_engine.toolkit.collectives import compute_device, gather
from offbeat_engine.values import WeightSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from offbeat_engine.megatron.blocks import Block
    from offbeat_engine.megatron.families import Shape
    from offbeat_engine.megatron.held import Held
    from offbeat_engine.world import World

    Values = Callable[[torch.nn.Parameter], torch.Tensor | None]

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """What leaves, in order, and from whom: `holders` has for each weight the ranks that send it, and their regions."""

    world: World
    shapes: dict[str, tuple[int, ...]]
    holders: dict[str, dict[int, list[Region]]]
    own: dict[str, list[tuple[torch.nn.Parameter, Block]]]
    device: torch.device

    @classmethod
    def agreed(cls, world: World, held: Sequence[Held], shape: Shape, head: str, tensor: Among) -> Leaving:
        """Let the ranks tell each other what they speak for; a collective. `tensor` is this rank's place among those of a tensor.

        Raises:
            AssertionError: the blocks of all ranks are not every weight once; a defect of this package.
        """
        listed = families.entries(shape, head)
        shapes = {
            name: whole
            for entry, layer, expert in listed
            for name, whole in zip(
                families.names(entry, layer, expert), families.whole_shapes(entry, shape), strict=True
            )
        }
        own: dict[str, list[tuple[torch.nn.Parameter, Block]]] = {}
        for one in held:
            for block in one.blocks if one.speaks else ():
                own.setdefault(block.name, []).append((one.param, block))
        number = {one: index for index, one in enumerate(listed)}
        runs = _runs(sorted(number[one.of] for one in held if one.speaks))
        holders: dict[str, dict[int, list[Region]]] = {name: {} for name in shapes}
        for rank, (place, told) in enumerate(gather(world, (tensor.rank, runs))):
            for index in chain.from_iterable(range(first, stop) for first, stop in told):
                for block in blocks_of(*listed[index], shape, Among(place, tensor.size)):
                    holders[block.name].setdefault(rank, []).append((block.offsets, block.sizes))
        for name, whole in shapes.items():
            count = sum(torch.Size(sizes).numel() for part in holders[name].values() for _, sizes in part)
            assert count == torch.Size(whole).numel(), f"`{name}` leaves {count} of {whole}"
        return cls(world=world, shapes=shapes, holders=holders, own=own, device=compute_device(world))

    def specs(self, dtype: torch.dtype) -> tuple[WeightSpec, ...]:
        """Return what `whole` yields."""
        return tuple(WeightSpec(name=name, shape=whole, dtype=dtype) for name, whole in self.shapes.items())

    def whole(
        self, dtype: torch.dtype, ranks: Collection[int], values: Values, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield every weight (or those of `names`), whole on those of `ranks` and None on the others.

        `values` gives for a parameter the tensor that leaves in its place: itself, or its gradient. A collective that every
        rank iterates to the end.
        """
        wanting = sorted({*ranks})
        for name, shape in self.shapes.items():
            if names is not None and name not in names:
                continue
            here = self.world.rank in wanting
            whole = torch.empty(shape, dtype=dtype, device=self.device) if here else None
            for holder, regions in self.holders[name].items():
                self._pass_on(name, holder, regions, wanting, whole, (dtype, values))
            yield name, whole

    def _pass_on(
        self,
        name: str,
        holder: int,
        regions: list[Region],
        wanting: list[int],
        whole: torch.Tensor | None,
        how: tuple[torch.dtype, Values],
    ) -> None:
        """Bring what `holder` has of a weight to those who want it, and into `whole` here."""
        dtype, values = how
        if self.world.rank == holder:
            parts = [_value(param, values, block) for param, block in self.own[name]]
            packed = torch.cat([part.to(dtype).reshape(-1) for part in parts])
        elif whole is not None:
            packed = torch.empty(
                sum(torch.Size(sizes).numel() for _, sizes in regions), dtype=dtype, device=self.device
            )
        else:
            packed = None
        if len(wanting) == self.world.size > 1:
            assert packed is not None
            dist.broadcast(packed, src=holder)
        else:
            self._send(packed, holder, wanting)
        if whole is None or packed is None:
            return
        at = 0
        for offsets, sizes in regions:
            count = torch.Size(sizes).numel()
            place = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            whole[place] = packed[at : at + count].view(sizes)
            at += count

    def _send(self, packed: torch.Tensor | None, holder: int, wanting: list[int]) -> None:
        # All ranks go through weights and holders in one order, so that none waits for one that waits for it.
        for rank in wanting:
            if rank == holder or self.world.rank not in (rank, holder):
                continue
            assert packed is not None
            if self.world.rank == holder:
                dist.send(packed, dst=rank)
            else:
                dist.recv(packed, src=holder)


def _value(param: torch.nn.Parameter, values: Values, block: Block) -> torch.Tensor:
    tensor = values(param)
    assert tensor is not None, f"nothing leaves for `{block.name}`"
    return block.of(tensor.detach())


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return sorted numbers as runs from a first one to one that is left out."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
