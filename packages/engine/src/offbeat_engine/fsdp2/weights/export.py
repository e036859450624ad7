"""Weights under their Hugging Face names: listed, streamed one at a time, written as a folder.

Weights in the names and shapes of their checkpoint, for families that transformers keeps otherwise in memory.

transformers 5 fuses the experts of a mixture into one tensor and renames modules as it loads, and undoes it in
`save_pretrained`. The same undoing runs here on one weight at a time, so that nothing needs the whole model: that
is right exactly when no exported weight is made of several held ones, which `check` finds out on empty tensors.

How a weight lies over ranks: this rank's shard, where that is in the whole, and wholes made of shards. Nothing else knows it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from offbeat_engine.batch import WeightKind, WeightSpec
from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2 import families
from offbeat_engine.fsdp2.weights import lora
from offbeat_engine.toolkit.hf import weight_files
from offbeat_engine.toolkit.hf.weight_files import copy_beside, named_files, write_files
from offbeat_engine.toolkit.state.slices import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from offbeat_engine.toolkit.world import World

    Gathered = Callable[[torch.Tensor], torch.Tensor | None]


Shapes = dict[str, tuple[int, ...]]


def converts(hf: Any) -> bool:
    """Return whether transformers converts this family's weights as it loads and saves them."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(hf, add_legacy=False))


def original(hf: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what `save_pretrained` would write for `tensor` held as `name`; only where `hf` `converts`."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(hf, {name: tensor})


def original_shapes(hf: Any, name: str, shape: tuple[int, ...]) -> Shapes:
    """Return names and shapes of `original`, computing nothing."""
    parts = original(hf, name, torch.empty(shape, device="meta"))
    return {part: tuple(tensor.shape) for part, tensor in parts.items()}


def check(hf: Any, held: Shapes) -> None:
    """Make sure that the weights `held` in memory can be exported one at a time.

    Raises:
        ConfigError: an exported weight is joined from several held ones.
    """
    if not converts(hf):
        return
    from transformers.core_model_loading import revert_weight_conversion

    empty = {name: torch.empty(shape, device="meta") for name, shape in held.items()}
    together = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(hf, empty).items()}
    singly: Shapes = {}
    for name, shape in held.items():
        singly |= original_shapes(hf, name, shape)
    odd = sorted({*together.items()} ^ {*singly.items()})
    if odd:
        raise ConfigError(
            f"{type(hf).__name__} joins several weights into one of its files' (such as `{odd[0][0]}`), which "
            "`named_weights` cannot do one at a time; use another family"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One tensor the model holds, and what leaves for it.

    `parts` are the exported names and shapes, in the order they leave; `convert` makes them of the whole tensor,
    None where there is one part that is the tensor itself. `adapter` is merged in first. What is `unrounded` leaves in its
    own dtype, because the model computes with it in that: buffers, and parameters of which `families.stays_float32`.
    """

    tensor: torch.Tensor
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    convert: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None
    adapter: lora.Adapter | None = None
    kind: WeightKind = WeightKind.FULL
    unrounded: bool = False


def named_tensors(hf: Any) -> dict[str, torch.Tensor]:
    """Return name to parameter (or persistent buffer), tied ones once, under the name `save_pretrained` keeps."""
    dropped: set[str] = set(hf.all_tied_weights_keys or ())
    named: dict[str, torch.Tensor] = {}
    seen: dict[int, str] = {}
    for name, tensor in hf.state_dict(keep_vars=True).items():
        earlier = seen.get(id(tensor))
        if earlier is None:
            seen[id(tensor)] = name
            named[name] = tensor
        elif earlier in dropped and name not in dropped:
            named = {name if key == earlier else key: value for key, value in named.items()}
            seen[id(tensor)] = name
    return named


def exported(hf: Any, kind: WeightKind = WeightKind.FULL) -> list[Source]:
    """Return what leaves the model, in order: the names of a Hugging Face checkpoint, or of a peft adapter."""
    named = named_tensors(hf)
    if kind is WeightKind.ADAPTER:
        return [_adapter_source(name, tensor) for name, tensor in named.items() if tensor.requires_grad]
    converted = converts(hf)
    return [_full_source(hf, named, name, converts=converted) for name in named if not lora.is_adapter(name)]


def _full_source(hf: Any, named: dict[str, torch.Tensor], name: str, *, converts: bool) -> Source:
    tensor, plain = named[name], lora.plain_name(name)
    shape, adapter = tuple(tensor.shape), lora.adapter_of(hf, named, name)
    unrounded = not isinstance(tensor, torch.nn.Parameter) or families.stays_float32(hf, plain)
    if not converts:
        return Source(tensor=tensor, parts=((plain, shape),), adapter=adapter, unrounded=unrounded)
    return Source(
        tensor=tensor,
        unrounded=unrounded,
        parts=tuple(original_shapes(hf, plain, shape).items()),
        convert=partial(original, hf, plain),
        adapter=adapter,
    )


def _adapter_source(name: str, tensor: torch.Tensor) -> Source:
    parts = ((lora.peft_name(name), tuple(tensor.shape)),)
    return Source(tensor=tensor, parts=parts, kind=WeightKind.ADAPTER)


def gradients(hf: Any, kind: WeightKind = WeightKind.FULL) -> list[Source]:
    """Return the accumulated gradients, named and cut like the weights they belong to."""
    sources = exported(hf, kind)
    if kind is WeightKind.FULL:  # adapters have left inside other weights; they go under peft's names
        sources += [
            _adapter_source(name, tensor)
            for name, tensor in named_tensors(hf).items()
            if lora.is_adapter(name)
        ]
    return [
        replace(source, tensor=source.tensor.grad, adapter=None)
        for source in sources
        if source.tensor.grad is not None
    ]


def specs(sources: list[Source], dtype: torch.dtype) -> tuple[WeightSpec, ...]:
    """Describe what `stream` will yield; DTensors are described whole."""
    return tuple(
        WeightSpec(name=name, shape=shape, dtype=_leaves_in(source, dtype), kind=source.kind)
        for source in sources
        for name, shape in source.parts
    )


def stream(sources: list[Source], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors in `dtype`, one at a time; a collective when they are sharded.

    A tensor may share memory with the live weight: copy it before the next optimizer step.
    """
    return _stream(sources, dtype, whole)


def stream_on(
    sources: list[Source], dtype: torch.dtype, ranks: Collection[int], rank: int
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """As `stream` for those of `ranks` alone; the others, of which `rank` may be one, get None for each tensor.

    A collective that all ranks iterate to the end; see `whole_on` for what those hold that want nothing.
    """
    return _stream(sources, dtype, partial(whole_on, ranks=ranks, rank=rank))


def _stream(sources: list[Source], dtype: torch.dtype, gathered: Gathered) -> Iterator[tuple[str, Any]]:
    for source in sources:
        merged = _merged(source, dtype, gathered)
        converted = None if source.convert is None or merged is None else source.convert(merged)
        for name, _ in source.parts:
            yield name, merged if converted is None else converted[name]


def _merged(source: Source, dtype: torch.dtype, gathered: Gathered) -> torch.Tensor | None:
    """Return the whole tensor in `dtype`, with its adapter added in float32; None where `gathered` gives none."""
    tensor, adapter, dtype = source.tensor.detach(), source.adapter, _leaves_in(source, dtype)
    if adapter is None:
        # Cast first: in bfloat16 half as many bytes cross between the ranks.
        return gathered(tensor.to(dtype))
    base, a, b = (gathered(each.detach()) for each in (tensor, adapter.a, adapter.b))
    if base is None or a is None or b is None:
        return None
    return (base.float() + adapter.scale * (b.float() @ a.float())).to(dtype)


def _leaves_in(source: Source, dtype: torch.dtype) -> torch.dtype:
    tensor = source.tensor
    return tensor.dtype if source.unrounded or not tensor.is_floating_point() else dtype


def export_folder(
    world: World, final: Path, hf: Any, sources: list[Source], dtype: torch.dtype, source: str
) -> None:
    """Write the Hugging Face folder `final` on rank 0, whole or not at all; a collective.

    Raises:
        CheckpointError: it could not be written; on all ranks together.
    """
    origin, planned = Path(source), specs(sources, dtype)
    named = stream_on(sources, dtype, {0}, world.rank)
    adapter = any(source.kind is WeightKind.ADAPTER for source in sources)
    # An adapter is one file, as peft wants it.
    files = (
        {"adapter_model.safetensors": [spec.name for spec in planned]} if adapter else named_files(planned)
    )

    def write(folder: Path | None) -> None:
        write_files(folder, files, planned, named)
        if folder is None:
            return
        if adapter:
            lora.write_config(folder, hf)
        else:
            _write_config(folder, hf, dtype, origin)
        copy_beside(folder, origin)

    weight_files.export_folder(world, final, origin, write)


def _write_config(folder: Path, hf: Any, dtype: torch.dtype, origin: Path) -> None:
    from copy import deepcopy

    config = deepcopy(hf.config)
    config.dtype = dtype
    config.architectures = [type(hf).__name__]
    config.save_pretrained(folder)
    path = folder / "config.json"
    written, source = json.loads(path.read_text()), json.loads((origin / "config.json").read_text())
    if families.restore(written, source):
        path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `tensor` as a plain tensor sharing its memory, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of `tensor` on every rank; a collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def region_of(place: torch.Tensor) -> Region:
    """Return which part of the whole tensor this rank holds: a box in it."""
    whole = Region.whole(tuple(place.shape))
    if not isinstance(place, DTensor):
        return whole
    *replicas, shard = place.placements
    assert isinstance(shard, Shard)
    assert all(replica == Replicate() for replica in replicas)
    mesh, size = place.device_mesh, place.shape[shard.dim]
    length = -(-size // mesh.size(mesh.ndim - 1))  # as `torch.chunk` cuts
    start = min(mesh.get_local_rank(mesh.ndim - 1) * length, size)
    shape = tuple(local(place.detach()).shape)
    assert shape[shard.dim] == min(length, size - start)
    return Region(tuple(start if dim == shard.dim else 0 for dim in range(place.dim())), shape)


def is_first_replica(place: torch.Tensor, world: World) -> bool:
    """Return whether this rank's part counts, where several ranks hold replicas of it: of what is whole, the first rank's."""
    if not isinstance(place, DTensor):
        return world.rank == 0
    return place.device_mesh.ndim == 1 or place.device_mesh.get_local_rank(0) == 0


def whole_on(tensor: torch.Tensor, ranks: Collection[int], rank: int) -> torch.Tensor | None:
    """Return the whole of `tensor`, in its shape and dtype, on those of `ranks`; None on the others. `rank` is this one.

    A collective of the ranks that hold one copy of the weights among them. Where all of these want it, it is gathered on
    all; else each that wants it is sent the others' shards, and who wants nothing never holds more than a shard.
    """
    here = rank in ranks
    if not isinstance(tensor, DTensor):
        return tensor if here else None
    cuts = [number for number, each in enumerate(tensor.placements) if each.is_shard()]
    placement = tensor.placements[cuts[0]] if len(cuts) == 1 else None
    if not isinstance(placement, Shard):  # not as `fully_shard` cuts by itself
        whole = tensor.full_tensor()
        return whole if here else None
    dim = placement.dim
    group = tensor.device_mesh.get_group(cuts[0])
    members: list[int] = dist.get_process_group_ranks(group)
    wanting = sorted({*members} & {*ranks})
    if wanting == sorted(members):
        return tensor.full_tensor()
    mine = _filled_up(tensor.to_local().movedim(dim, 0), -(-tensor.shape[dim] // len(members)))
    whole = None
    for one in wanting:
        if one != rank:
            dist.gather(mine, dst=one, group=group)
            continue
        # One memory for all shards: they lie in it as in the whole, and what fills up the last is cut off.
        rows = mine.new_empty((len(members) * len(mine), *mine.shape[1:]))
        dist.gather(mine, list(rows.split(len(mine))), dst=one, group=group)
        whole = rows[: tensor.shape[dim]].movedim(0, dim).contiguous()
    return whole


def _filled_up(shard: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return `shard` with rows of zeros after its own: ranks gather equal shapes."""
    if len(shard) == num_rows:
        return shard.contiguous()
    rows = shard.new_zeros((num_rows, *shard.shape[1:]))
    rows[: len(shard)] = shard
    return rows
