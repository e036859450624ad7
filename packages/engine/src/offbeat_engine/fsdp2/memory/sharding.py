"""Shard a built model over the ranks with `fully_shard`.

Values for a model that was sharded without them: each rank reads its own part from the files.

A rank's host memory holds its shards, and for a moment one tensor of the model besides: only what transformers makes
of other tensors in ways that do not go row by row is put together whole.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import Shard

from offbeat_engine.config import Dtype, OptimizerName
from offbeat_engine.errors import ConfigError
from offbeat_engine.fsdp2 import families
from offbeat_engine.fsdp2.weights import lora
from offbeat_engine.fsdp2.weights.export import is_first_replica, local, region_of
from offbeat_engine.fsdp2.weights.loading import Group, OnMeta, convert, put
from offbeat_engine.fsdp2.weights.state_names import StateNames
from offbeat_engine.toolkit.collectives import compute_device, first_failure, sum_tensor
from offbeat_engine.toolkit.state.slices import Region

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from offbeat_engine.fsdp2.config import Fsdp2Config
    from offbeat_engine.fsdp2.model.trainable import Scorer
    from offbeat_engine.toolkit.hf.weight_files import Read
    from offbeat_engine.toolkit.world import SubGroup, World


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
    except (OSError, RuntimeError, ValueError, SafetensorError) as caught:
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


# Below this size a model is one FSDP group, gathered once per step: on small models the hooks and collectives
# of every layer cost more than the memory they save.
SMALL_MODEL_BYTES = 256 << 20


def shard(scorer: Scorer, config: Fsdp2Config, world: World) -> bool:
    """Shard `scorer` in place over the ranks and put it on their devices; return whether it is sharded.

    One rank in float32, or for inference alone, needs no sharding, no gather and no cast, so it is left alone. One rank in bfloat16
    is sharded over itself: `fully_shard` keeps the float32 master weights and reduces gradients in float32.
    """
    if world.size == 1 and (config.dtype == Dtype.FLOAT32 or config.inference_only):
        _place(scorer, world)
        return False
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    once, shard_group = gathers_once(scorer, config), _sharder(scorer, config, world)
    if not once:
        keep = config.reshard == "never" or holds_all(scorer, config, world)
        for layer in families.layers_of(scorer.hf):
            shard_group(layer, reshard_after_forward=not keep)
        if (table := _own_table(scorer)) is not None:
            # By itself, so that a gather never holds two copies of both ends of the model at once.
            shard_group(table, reshard_after_forward=config.reshard == "always")
    # What is outside the layers is needed first in backward: letting go of it in between gains nothing but for "always".
    shard_group(scorer, reshard_after_forward=config.reshard == "always" and not once)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):  # gradients are shares of a global sum: added up, not averaged
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(scorer, "plain")
    _place(scorer, world)

    def add_up(grad: torch.Tensor) -> torch.Tensor:
        return sum_tensor(world, grad.clone())

    for param in _kept_whole(scorer, config):
        if param.requires_grad and world.size > 1:
            param.register_hook(add_up)
    return True


def _sharder(scorer: Scorer, config: Fsdp2Config, world: World) -> Callable[..., object]:
    """Return `fully_shard` with what is the same for all groups."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    placements = _placements(scorer, config, config.shard_ranks(world.size))
    # Inputs are not cast: temperatures must stay float32, and hidden states are in the compute dtype already.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == Dtype.BFLOAT16 else None,
        reduce_dtype=getattr(torch, config.reduce_dtype),
        cast_forward_inputs=False,
    )
    return partial(
        fully_shard,
        mesh=_mesh(config, world),
        mp_policy=policy,
        ignored_params=set(_kept_whole(scorer, config)),
        shard_placement_fn=placements.get,
    )


def _placements(scorer: Scorer, config: Fsdp2Config, num_ranks: int) -> dict[torch.nn.Parameter, Shard]:
    """Return what is not cut by rows: experts that do not come out even over `num_ranks`, along a dimension that does.

    By rows, 8 experts on 16 ranks would lie on 8 of them, whole. Moments of eight bits have blocks, which need rows.
    """
    hf = scorer.hf
    uneven = {
        name: param for name, param in hf.named_parameters() if param.dim() > 2 and len(param) % num_ranks
    }
    if not uneven or config.optimizer.name == OptimizerName.ADAMW_8BIT:
        return {}
    names, placements = StateNames(hf), dict[torch.nn.Parameter, Shard]()
    for name, param in uneven.items():
        for dim in range(1, param.dim()):
            if param.shape[dim] % num_ranks == 0 and names.can_cut(name, dim):
                placements[param] = Shard(dim)
    return placements


def _kept_whole(scorer: Scorer, config: Fsdp2Config) -> list[torch.nn.Parameter]:
    """Return the parameters that stay float32 under bfloat16: whole on every rank, because an FSDP group has one dtype.

    They are small: routers. Each rank adds up their gradients over all ranks by itself.
    """
    if config.dtype == Dtype.FLOAT32:
        return []
    named = scorer.hf.named_parameters()
    return [param for name, param in named if families.stays_float32(scorer.hf, lora.plain_name(name))]


def _own_table(scorer: Scorer) -> torch.nn.Module | None:
    """Return the embedding of tokens where no other module holds its weights."""
    table = scorer.hf.get_input_embeddings()
    own = {id(param) for param in table.parameters()}
    everywhere = [id(param) for _, param in scorer.named_parameters(remove_duplicate=False)]
    return table if sum(param in own for param in everywhere) == len(own) else None


def _place(scorer: Scorer, world: World) -> None:
    """Put what is left on the CPU on the rank's device, or read there what is not in memory yet."""
    on_meta, scorer.on_meta = scorer.on_meta, None
    if on_meta is None:
        scorer.to(compute_device(world))
    else:
        fill(scorer, on_meta, world)


def peers_of(config: Fsdp2Config, world: World) -> SubGroup | None:
    """Return the group of ranks that share this rank's sequences; None without sequence parallelism. A collective."""
    if config.sequence_parallel_size == 1:
        return None
    return world.split(config.sequence_parallel_size, config.collective_timeout_s)


def num_replicas(config: Fsdp2Config, world: World) -> int:
    """Return how many replicas of the weights the ranks hold among them."""
    return world.size // (config.shard_size or world.size)


def _mesh(config: Fsdp2Config, world: World) -> DeviceMesh:
    """Return one dimension of all ranks, or replicas times the consecutive ranks that share one (hybrid sharding).

    Gradients are summed over both, so ranks that share sequences need no dimension of their own.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    world.ensure_group(config.collective_timeout_s)
    replicas = num_replicas(config, world)
    if replicas == 1:
        return init_device_mesh(world.device, (world.size,))
    # Groups of our own making, because those that a mesh makes have torch's deadline and not the config's.
    groups = [
        world.split(replicas, config.collective_timeout_s, stride=config.shard_size).group,
        world.split(config.shard_size, config.collective_timeout_s).group,
    ]
    ranks = torch.arange(world.size).view(replicas, config.shard_size)
    return DeviceMesh.from_group(groups, world.device, mesh=ranks, mesh_dim_names=("replicas", "shards"))


def gathers_once(scorer: Scorer, config: Fsdp2Config) -> bool:
    """Return whether the model is one group: gathered once, with gradients scattered once, in a mini-batch."""
    num_bytes = sum(param.numel() for param in scorer.parameters()) * 4
    return config.reshard == "auto" and num_bytes <= SMALL_MODEL_BYTES


def holds_all(scorer: Scorer, config: Fsdp2Config, world: World) -> bool:
    """Return whether gathered weights stay for the mini-batch because each rank holds all weights, and trains them.

    They add an eighth to the 16 bytes of a parameter with its gradient and moments. Frozen weights would take twice their memory.
    """
    trained = all(param.requires_grad for param in scorer.parameters())
    return config.reshard == "auto" and config.shard_ranks(world.size) == 1 and trained
