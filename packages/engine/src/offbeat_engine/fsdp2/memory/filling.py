"""Values for a model that was sharded without them: each rank reads its own part from the files.

A rank's host memory holds its shards, and for a moment one tensor of the model besides: only what transformers makes
of other tensors in ways that do not go row by row is put together whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2.weights import lora
from offbeat_engine.fsdp2.weights.load_plan import Group, convert
from offbeat_engine.fsdp2.weights.loading import OnMeta, put
from offbeat_engine.fsdp2.weights.shards import is_first_replica, local, region_of
from offbeat_engine.toolkit.collectives import compute_device, first_failure, sum_tensor
from offbeat_engine.toolkit.state.slices import Region

if TYPE_CHECKING:
    from offbeat_engine.fsdp2.model.scorer import Scorer
    from offbeat_engine.toolkit.hf.weight_files import Read
    from offbeat_engine.world import World


def fill(scorer: Scorer, on_meta: OnMeta, world: World) -> None:
    """Give `scorer`, sharded or not, memory on the rank's device and its values; a collective.

    Raises:
        ConfigError: a file could not be read on some rank; all ranks raise together.
    """
    sums: dict[str, int] = {}
    error: Exception | None = None
    try:
        _give_memory(scorer, world)
        places = {lora.plain_name(name): (name, tensor) for name, tensor in _tensors(scorer.hf).items()}
        for name, whole in on_meta.initialised.items():
            place = places[lora.plain_name(name)][1]
            _write(place, whole[region_of(place).within(Region.whole(tuple(whole.shape)))])
        for group in on_meta.plan.groups:
            _fill_group(scorer, on_meta, group, places, sums, world)
    except (OSError, RuntimeError, ValueError) as caught:
        error = caught
    failure = first_failure(world, error)
    if failure is not None:
        raise ConfigError(f"the weights could not be read from their files: {failure}") from error
    if scorer.base:
        mine = [sums.get(name, 0) for name in scorer.base]
        total = sum_tensor(world, torch.tensor(mine, dtype=torch.int64, device=compute_device(world)))
        scorer.base.update(zip(scorer.base, map(int, total.tolist()), strict=True))


def _give_memory(scorer: Scorer, world: World) -> None:
    """Put parameters and buffers on the device, uninitialised, keeping tied ones one tensor."""
    names: dict[int, list[str]] = {}
    for named in (scorer.named_parameters, scorer.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    scorer.to_empty(device=compute_device(world))
    for first, *others in names.values():
        for other in others:
            parent, _, last = first.rpartition(".")
            put(scorer, other, getattr(scorer.get_submodule(parent), last))


def _tensors(hf: Any) -> dict[str, torch.Tensor]:
    return dict(hf.named_parameters(remove_duplicate=False)) | dict(hf.named_buffers(remove_duplicate=False))


def _fill_group(
    scorer: Scorer,
    on_meta: OnMeta,
    group: Group,
    places: dict[str, tuple[str, torch.Tensor]],
    sums: dict[str, int],
    world: World,
) -> None:
    with on_meta.files.opened(group.names) as read, torch.no_grad():
        made: dict[str, torch.Tensor] = {}
        if group.converter is not None and not group.by_rows:
            parts = {
                pattern: [read(name, 0, None) for name in names] for pattern, names in group.sources.items()
            }
            made = convert(group, parts, scorer.hf)
        for target in group.targets:
            full_name, place = places[target]
            region = region_of(place)
            if not region.numel:
                continue
            slices = region.within(Region.whole(tuple(place.shape)))
            rows = slices[0] if slices else slice(0, 0)
            if target in made:
                values = made[target][slices]
            elif group.converter is None:
                values = read(group.names[0], rows.start, rows.stop)
                values = values[(slice(None), *slices[1:])] if slices else values
            else:
                values = convert(group, _parts(group, region, rows, on_meta, read), scorer.hf)[target]
            _write(place, values)
            if full_name in scorer.base and is_first_replica(place, world):
                sums[full_name] = lora.fingerprint(values.float(), rows.start)


def _parts(
    group: Group, region: Region, rows: slice, on_meta: OnMeta, read: Read
) -> dict[str, list[torch.Tensor]]:
    """Read what `region` of a target that is made `by_rows` consists of; of a part of a source no more is kept."""
    parts: dict[str, list[torch.Tensor]] = {}
    for pattern, names in group.sources.items():
        for name in names[rows]:
            whole = Region.whole(on_meta.files.shapes[name])
            part = group.source_region(region, whole.shape)
            values = read(name, 0, None)
            parts.setdefault(pattern, []).append(
                values if part == whole else values[part.within(whole)].clone()
            )
    return parts


def _write(place: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        local(place.detach()).copy_(values)
