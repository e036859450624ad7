"""What `init_model` makes of a config, in order: groups, model, values, names, optimizer.

Weights on their way out, under their names in the files: one at a time, for all ranks or some, whole or in pieces.

Who speaks for which weights the ranks tell each other once; which blocks that are follows from the tables. A whole weight is made of what its holders send: nothing is added up,
so bits stay as they are, and nobody holds more than one weight beyond its own.
"""

# transformers' configs and megatron-core are untyped, torch's distributed functions are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from offbeat_engine.batch import WeightSpec
from offbeat_engine.errors import ConfigError
from offbeat_engine.megatron import families
from offbeat_engine.megatron.families import Among, blocks_of
from offbeat_engine.megatron.groups import make_groups
from offbeat_engine.megatron.layers import model, transformer_engine
from offbeat_engine.megatron.loading import fill, held_by, hf_config, source_of
from offbeat_engine.megatron.updater import Updater, wrapped
from offbeat_engine.toolkit.collectives import compute_device, first_failure, gather
from offbeat_engine.toolkit.hf.probing import sequence_limit
from offbeat_engine.toolkit.state.slices import Region
from offbeat_engine.toolkit.step.throughput import ModelCost

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from offbeat_engine.megatron.config import MegatronConfig
    from offbeat_engine.megatron.families import Block, Shape
    from offbeat_engine.megatron.groups import Groups
    from offbeat_engine.megatron.loading import Held
    from offbeat_engine.toolkit.world import World

    Values = Callable[[torch.nn.Parameter], torch.Tensor | None]


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
        listed, shapes = families.entries(shape, head), families.all_in_files(shape, head)
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
                    holders[block.name].setdefault(rank, []).append(Region(block.offsets, block.sizes))
        for name, whole in shapes.items():
            count = sum(region.numel for part in holders[name].values() for region in part)
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
            count = sum(region.numel for region in regions)
            packed = torch.empty(count, dtype=dtype, device=self.device)
        else:
            packed = None
        if len(wanting) == self.world.size > 1:
            assert packed is not None
            dist.broadcast(packed, src=holder)
        else:
            self._send(packed, holder, wanting)
        if whole is None or packed is None:
            return
        parts = packed.split([region.numel for region in regions])
        for region, part in zip(regions, parts, strict=True):
            whole[region.within(Region.whole(tuple(whole.shape)))] = part.view(region.shape)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A built engine; `updater` is None where nothing is trained, and `trained` are the names of what is, on any rank.

    `with_te`: of Transformer Engine's layers.
    """

    groups: Groups
    shape: Shape
    chunks: Sequence[model.Chunk]
    held: Sequence[Held]
    leaving: Leaving
    updater: Updater | None
    trained: frozenset[str]
    sequence_limit: int | None
    with_te: bool
    cost: ModelCost


def build_parts(config: MegatronConfig, world: World) -> Parts:
    """Build everything; a collective.

    Raises:
        ConfigError: the folder holds no model that fits the config, on some rank.
    """
    found = hf_config(config.model)
    shape = families.shape_of(found, config.model.head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, of packages that it would rather have
        groups = make_groups(config, world)
        with_te = transformer_engine.is_used(config, world)
        with groups.lent():
            models = model.build(config, shape, found, groups, with_te)
            plain = [model.Chunk(model=one, wrapped=one) for one in models]
            held = held_by(plain, shape, groups, config.model.head)
            trained = _freeze(config, held, shape)
            chunks = wrapped(config, models)
            updater = None if config.inference_only else Updater(config, chunks)
            # After the wrapper, which copies weights into a buffer of its own: before, values would be in memory twice. And after
            # the optimizer, whose master weights are as exact as the files.
            _fill_together(config, world, held, found, updater)
            leaving = Leaving.agreed(world, held, shape, config.model.head, groups.tensor)
    return Parts(
        groups=groups,
        shape=shape,
        chunks=chunks,
        held=held,
        leaving=leaving,
        updater=updater,
        trained=trained,
        sequence_limit=sequence_limit(found),
        with_te=with_te,
        cost=cost_of(shape, config.model.head, frozenset() if config.inference_only else trained),
    )


def cost_of(shape: Shape, head: str, trained: frozenset[str]) -> ModelCost:
    """Return what arithmetic counts of the whole model; `trained` are the names of what is trained."""
    visited = shape.experts_per_token / shape.num_experts if shape.num_experts else 1.0
    num_params = num_trained = 0.0
    for entry, layer, expert in families.entries(shape, head):
        if entry is families.EMBEDDING and not shape.tied:
            continue  # looked up
        for name, whole in families.in_files(entry, layer, expert, shape).items():
            counted = math.prod(whole) * (1.0 if expert is None else visited)
            num_params += counted
            num_trained += counted if name in trained else 0.0
    return ModelCost(
        num_params=round(num_params),
        num_trained=round(num_trained),
        num_layers=shape.num_layers,
        attention_width=shape.num_heads * shape.head_dim,
    )


def _fill_together(
    config: MegatronConfig,
    world: World,
    held: Sequence[Held],
    found: Any,  # noqa: ANN401 a config of transformers
    updater: Updater | None,
) -> None:
    """Read the weights on every rank or raise on every rank."""
    error: Exception | None = None
    try:
        shape, spread = families.shape_of(found, config.model.head), found.initializer_range
        fill(held, source_of(config.model, shape, spread), config.model, spread, updater)
    except (OSError, RuntimeError, ValueError, SafetensorError) as caught:
        error = caught
    failure = first_failure(world, error)
    if failure is not None:
        raise ConfigError(f"the weights could not be read from their files: {failure}") from error


def _freeze(config: MegatronConfig, held: Sequence[Held], shape: Shape) -> frozenset[str]:
    """Take every weight whose name in the files matches one of `freeze`; return the names of all others.

    Raises:
        ConfigError: a pattern matches nothing, or a part of what is held as one weight, or nothing is left to train.
    """
    listed = families.entries(shape, config.model.head)
    called = [families.names(*one) for one in listed]
    for pattern in config.freeze:
        if not any(fnmatchcase(name, pattern) for names in called for name in names):
            raise ConfigError(f"`freeze`: no weight matches {pattern!r} (tied weights go by one name)")

    def frozen(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in config.freeze)

    for names in called:
        if len({frozen(name) for name in names}) > 1:
            raise ConfigError(
                f"`freeze`: the model holds {', '.join(f'`{name}`' for name in names)} as one weight; freeze all or none"
            )
    if all(frozen(names[0]) for names in called):
        raise ConfigError(f"`freeze`: {list(config.freeze)} leave nothing to train; name fewer weights")
    for one in held:
        if config.inference_only or any(frozen(block.name) for block in one.blocks):
            one.param.requires_grad_(False)
    return frozenset(name for names in called for name in names if not frozen(name))
