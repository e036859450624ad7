"""Training state under the names and shapes of the Hugging Face checkpoint, cut as this rank holds it.

Where transformers puts experts upon one another (row i of one tensor in memory is made of the tensors of expert i in the files) a
rank's rows leave as those experts' own tensors, and come back so; Adam's moments go the same way, since nothing is done to numbers but
moving them. What transformers makes otherwise of a family's tensors stays under the name that it has in memory: that moves between
numbers of ranks, and no other engine finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.batch import WeightShard
from offbeat_engine.errors import CheckpointError
from offbeat_engine.fsdp2.weights import export, lora
from offbeat_engine.fsdp2.weights.loading import Group, convert, make_plan
from offbeat_engine.toolkit.state.training_state import EXP_AVG, EXP_AVG_SQ, WEIGHT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from offbeat_engine.toolkit.state.slices import Region, Shape, SliceReader

_LIKE_WEIGHTS = frozenset({WEIGHT, EXP_AVG, EXP_AVG_SQ})


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPart:
    """A rank's part of one tensor of the training state: `values`, which lie at `region` in a whole of `shape`.

    `kind` is what comes before the name of the weight, `name`, that it belongs to.
    """

    kind: str
    name: str
    values: torch.Tensor
    region: Region
    shape: Shape

    @property
    def rows(self) -> slice:
        """Which rows of the whole it has."""
        return slice(self.region.offsets[0], self.region.offsets[0] + self.region.shape[0])


class StateNames:
    """Between what a model holds and what a checkpoint of its training holds."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._shapes: dict[str, Shape] = {}
        self._groups: dict[str, Group] = {}
        if export.converts(hf):
            self._shapes = {name: shape for source in export.exported(hf) for name, shape in source.parts}
            for group in make_plan(hf, self._shapes).groups:
                self._groups |= dict.fromkeys(group.targets, group)

    def can_cut(self, name: str, dim: int) -> bool:
        """Return whether shards of the weight `name` may be cut along `dim`: not where several tensors of a file lie along it."""
        group = self._groups.get(lora.plain_name(name))
        return group is None or not group.by_rows or group.source_dim(dim) is not None

    def names(self, name: str) -> list[str]:
        """Return what the weight held as `name` is called in files: of experts, the names of each."""
        if lora.is_adapter(name):
            return [lora.peft_name(name)]
        plain = lora.plain_name(name)
        group = self._groups.get(plain)
        if group is None or not (group.converter is None or group.by_rows):
            return [plain]
        return group.names

    def wanted(self, part: LocalPart) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return names, whole shapes and dtypes of what `part` and the rows of other ranks are made of."""
        names = self.names(part.name) if part.kind in _LIKE_WEIGHTS else [part.name]
        shapes = self._shapes if self._group(part) else dict.fromkeys(names, part.shape)
        return {part.kind + name: (shapes[name], part.values.dtype) for name in names}

    def pieces(self, part: LocalPart) -> Iterator[WeightShard]:
        """Yield what a checkpoint keeps of `part`."""
        group = self._group(part)
        if group is None:
            (name,) = self.wanted(part)
            yield WeightShard(name=name, shape=part.shape, offsets=part.region.offsets, tensor=part.values)
            return
        if not len(part.values):
            return
        made = export.original(self._hf, lora.plain_name(part.name), part.values.detach())
        for names in group.sources.values():
            # Made of a part of the experts, they are numbered from the first one.
            for called, name in zip(names, names[part.rows], strict=False):
                if called not in made:
                    raise CheckpointError(
                        f"{type(self._hf).__name__}: expected `{part.name}` to be exported as `{name}`, got "
                        f"{', '.join(sorted(made)[:3])}; report it with the transformers version"
                    )
                shape = self._shapes[name]
                box = group.source_region(part.region, shape)
                tensor = made[called].reshape(box.shape)
                yield WeightShard(name=part.kind + name, shape=shape, offsets=box.offsets, tensor=tensor)

    def fill(self, part: LocalPart, reader: SliceReader) -> None:
        """Read `part.values`."""
        group = self._group(part)
        if group is None:
            (name,) = self.wanted(part)
            reader.fill(name, part.region, part.values)
        elif len(part.values):
            parts = {
                pattern: [
                    reader.read(part.kind + name, group.source_region(part.region, self._shapes[name]))
                    for name in names[part.rows]
                ]
                for pattern, names in group.sources.items()
            }
            made = convert(group, parts, self._hf)[lora.plain_name(part.name)]
            with torch.no_grad():
                part.values.copy_(made)

    def _group(self, part: LocalPart) -> Group | None:
        """Return what `part` is taken apart by, None where it stays in one piece."""
        group = self._groups.get(lora.plain_name(part.name)) if part.kind in _LIKE_WEIGHTS else None
        return group if group is not None and group.by_rows else None
