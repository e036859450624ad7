"""How tensors of a checkpoint become those that a model holds, worked out on shapes alone.

transformers 5 renames weights as it loads them, and fuses or splits some (the experts of a mixture are one tensor in
memory). Its own rules run here for one group of tensors at a time, and where a group is experts put one upon the
other, for a range of experts, so that no rank needs what it will not keep.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from offbeat_engine.toolkit.state.slices import Region, Shape

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors `targets` of the model that are made of the same `sources` (pattern to names in files, in order).

    Without a `converter` the one target is the one source. `by_rows`: rows of the one target are made of as many
    of each pattern's sources.
    """

    targets: Shapes
    sources: dict[str, tuple[str, ...]]
    converter: Any | None = None
    by_rows: bool = False

    @property
    def names(self) -> list[str]:
        """Return all sources' names in files."""
        return [name for names in self.sources.values() for name in names]

    def source_dim(self, dim: int) -> int | None:
        """Return which dimension of each source becomes `dim` of the target, `by_rows` from 1 on; None where sources lie along it."""
        from transformers.core_model_loading import Transpose

        assert self.by_rows
        assert self.converter is not None
        for step in reversed(self.converter.operations[1:]):
            if type(step) is Transpose:
                dim = {step.dim0: step.dim1, step.dim1: step.dim0}.get(dim, dim)
            elif step.dim == dim:
                return None
        return dim - 1

    def source_region(self, region: Region, source: Shape) -> Region:
        """Return the part of a source of shape `source` that `region` of the target is made of, `by_rows`."""
        (target,) = self.targets.values()
        offsets, shape = [0] * len(source), [*source]
        for dim in range(1, len(target)):
            if region.shape[dim] != target[dim]:
                place = self.source_dim(dim)
                assert place is not None, "it is not cut along such a dimension"
                offsets[place], shape[place] = region.offsets[dim], region.shape[dim]
        return Region(tuple(offsets), tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All groups, what in the files nothing is made of, and transformers' rules that were used."""

    groups: tuple[Group, ...]
    unused: tuple[str, ...]
    rules: tuple[Any, ...]

    @property
    def targets(self) -> Shapes:
        """Return the shapes that the tensors of the model will have."""
        return {name: shape for group in self.groups for name, shape in group.targets.items()}


def make_plan(hf: Any, files: Shapes) -> Plan:
    """Match the tensors of `files` with those of `hf`.

    Raises:
        ValueError: some cannot be put together as the family wants them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    rules: list[Any] = get_model_conversion_mapping(hf)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    held = hf.state_dict()
    made_of: dict[str, tuple[Any | None, dict[str, list[str]]]] = {}
    unused: list[str] = []
    # In transformers' order: experts by number, and rules that wait for the first of several names.
    for name in sorted(files, key=dot_natural_key):
        target, pattern = _renamed(hf, held, name, renamings, converters)
        if target not in held:
            unused.append(name)
            continue
        converter = None if pattern is None else of_pattern[pattern]
        made_of.setdefault(target, (converter, {}))[1].setdefault(pattern or name, []).append(name)
    groups = tuple(_group(hf, files, target, *parts) for target, parts in made_of.items())
    used = tuple(rule for rule in rules if rule.was_used())
    return Plan(groups=groups, unused=tuple(unused), rules=used)


def _renamed(
    hf: Any, held: dict[str, Any], name: str, renamings: list[Any], converters: list[Any]
) -> tuple[str, str | None]:
    from transformers.core_model_loading import rename_source_key

    target, pattern = rename_source_key(name, renamings, converters, hf.base_model_prefix, held)
    if target not in held and name in held:  # the rules are for checkpoints of another age
        return rename_source_key(name, [], [], hf.base_model_prefix, held)
    return target, pattern


def _group(
    hf: Any, files: Shapes, target: str, converter: Any | None, sources: dict[str, list[str]]
) -> Group:
    named = {pattern: tuple(names) for pattern, names in sources.items()}
    if converter is None:
        first = next(iter(named))  # where two names come to the same weight, transformers takes the first
        return Group(targets={target: files[first]}, sources={first: (first,)})
    empty = {
        pattern: [torch.empty(files[name], device="meta") for name in names]
        for pattern, names in named.items()
    }
    try:
        made = _converted(converter, target, empty, hf)
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        raise ValueError(
            f"`{target}` cannot be made of `{next(iter(named.values()))[0]}` ({error})"
        ) from error
    targets = {name: tuple(tensor.shape) for name, tensor in made.items()}
    by_rows = (
        len(targets) == 1 and _keeps_rows(converter) and len({len(names) for names in named.values()}) == 1
    )
    return Group(targets=targets, sources=named, converter=converter, by_rows=by_rows)


def _keeps_rows(converter: Any) -> bool:
    """Return whether row i of what comes out is made of source i of each pattern, and of nothing else."""
    from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, Transpose

    first, *rest = converter.operations
    if type(first) is not MergeModulelist or first.dim != 0:
        return False
    for step in rest:
        dims = (step.dim0, step.dim1) if type(step) is Transpose else (getattr(step, "dim", 0),)
        if type(step) not in (Concatenate, Interleave, Transpose) or min(dims) < 1:
            return False
        if getattr(step, "check_dims", False):  # looks at the shape of the whole
            return False
    return True


def convert(group: Group, tensors: dict[str, list[torch.Tensor]], hf: Any) -> dict[str, torch.Tensor]:
    """Return the targets of `group` made of `tensors`, which go by pattern like its sources."""
    return _converted(group.converter, next(iter(group.targets)), tensors, hf)


def _converted(
    converter: Any, target: str, tensors: dict[str, list[torch.Tensor]], hf: Any
) -> dict[str, torch.Tensor]:
    working = deepcopy(converter)
    for pattern, parts in tensors.items():
        working.collected_tensors[pattern].extend(parts)
    made = working.convert(target, model=hf, config=hf.config)
    return {name: part[0] if isinstance(part, list) else part for name, part in made.items()}
