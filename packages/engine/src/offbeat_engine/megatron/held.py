"""What this rank holds, in the words of the files: each parameter with its blocks, and whether it speaks for them."""

# megatron-core is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat_engine.megatron import families
from offbeat_engine.megatron.blocks import Block, blocks_of
from offbeat_engine.megatron.families import Cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from offbeat_engine.megatron.families import Entry, Shape
    from offbeat_engine.megatron.groups import Groups
    from offbeat_engine.megatron.model import Chunk

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(?P<number>\d+)\.(?P<of>.+)$")
_GROUPED = re.compile(r"^mlp\.experts\.(?P<of>linear_fc[12]\.weight)(?P<number>\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter of this rank and its blocks; `of` is what it is in `families.entries`.

    `alone`: of the ranks that hold them in one copy of the model it is the one they leave from; `speaks`: of all copies, too.
    """

    param: torch.nn.Parameter
    of: tuple[Entry, int | None, int | None]
    blocks: tuple[Block, ...]
    alone: bool
    speaks: bool


def held_by(chunks: Sequence[Chunk], shape: Shape, groups: Groups, head: str) -> list[Held]:
    """Return all parameters of this rank's chunks."""
    single = {entry.ours: entry for entry in (families.EMBEDDING, families.FINAL_NORM, *families.VALUE_HEAD)}
    if head == "lm":
        single[families.HEAD.ours] = families.TIED_HEAD if shape.tied else families.HEAD
    of_layer = {entry.ours: entry for entry in shape.family.layer}
    found: list[Held] = []
    for chunk in chunks:
        for name, param in chunk.state().items():
            in_layer = _LAYER.match(name)
            if in_layer is None:
                found.append(_held(param, single[name], None, None, shape, groups))
                continue
            # As the layer itself says: with a pipeline of several runs a rank's layers are no neighbours.
            layer = int(chunk.model.decoder.layers[int(in_layer[1])].layer_number) - 1
            template, expert = _of_expert(in_layer[2], shape, groups)
            found.append(_held(param, of_layer[template], layer, expert, shape, groups))
    return found


def _of_expert(name: str, shape: Shape, groups: Groups) -> tuple[str, int | None]:
    """Return the name as the tables have it, and the number of the expert among all."""
    match = _EXPERT.match(name) or _GROUPED.match(name)
    if match is None:
        return name, None
    share = shape.num_experts // groups.expert.size
    expert = groups.expert.rank * share + int(match["number"])
    return f"mlp.experts.local_experts.{{expert}}.{match['of']}", expert


def _held(
    param: torch.nn.Parameter,
    entry: Entry,
    layer: int | None,
    expert: int | None,
    shape: Shape,
    groups: Groups,
) -> Held:
    # megatron-core says so only of weights that it fills itself, and without it counts the norm of one rank's part alone.
    setattr(param, "tensor_model_parallel", entry.cut is not Cut.COPY)  # noqa: B010 a name of megatron-core's
    first = groups.speaks_for_copies if expert is None else groups.speaks_for_experts
    # The last stage's copy of a tied embedding is the first stage's to speak for.
    alone = (entry.cut is not Cut.COPY or groups.tensor.rank == 0) and entry is not families.TIED_HEAD
    return Held(
        param=param,
        of=(entry, layer, expert),
        blocks=tuple(blocks_of(entry, layer, expert, shape, groups.tensor)),
        alone=alone,
        speaks=first and alone,
    )
