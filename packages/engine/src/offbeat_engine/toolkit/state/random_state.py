"""The ranks' random states as named tensors of a checkpoint: one of the CPU's generator, one of CUDA's where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offbeat_engine.values import WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from offbeat_engine.toolkit.state.training_state import Loaded
    from offbeat_engine.world import World


def taken(world: World) -> dict[str, torch.Tensor]:
    """Return this rank's random states, by name."""
    state = {_cpu(world): torch.get_rng_state()}
    if torch.cuda.is_available():
        state[_cuda(world)] = torch.cuda.get_rng_state()
    return state


def pieces(world: World) -> Iterator[WeightShard]:
    """Yield this rank's random states as a checkpoint takes them."""
    for name, state in taken(world).items():
        yield WeightShard(name=name, shape=tuple(state.shape), offsets=(0,), tensor=state)


def read(world: World, loaded: Loaded) -> dict[str, torch.Tensor]:
    """Return what this rank can use of a checkpoint's random states, by name.

    It is empty if the number of ranks has changed: saved states belong to ranks that no longer exist.
    """
    if loaded.meta["num_ranks"] != world.size:
        return {}
    usable = [_cpu(world), *([_cuda(world)] if torch.cuda.is_available() else [])]
    return {name: loaded.reader.read(name) for name in usable if name in loaded.index}


def restore(world: World, state: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's generators to what there is of them in `state`; another one goes on as it is."""
    if _cpu(world) in state:
        torch.set_rng_state(state[_cpu(world)])
    if _cuda(world) in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[_cuda(world)])


def _cpu(world: World) -> str:
    return f"random/cpu.rank_{world.rank}"


def _cuda(world: World) -> str:
    return f"random/cuda.rank_{world.rank}"
