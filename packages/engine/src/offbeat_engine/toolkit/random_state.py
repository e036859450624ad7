"""The ranks' random states as named tensors of a checkpoint: one of the CPU's generator, one of CUDA's where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offbeat_engine.world import World


def taken(world: World) -> dict[str, torch.Tensor]:
    """Return this rank's random states, by name."""
    state = {_cpu(world): torch.get_rng_state()}
    if torch.cuda.is_available():
        state[_cuda(world)] = torch.cuda.get_rng_state()
    return state


def empty(world: World, written: Mapping[str, Any], num_ranks: int) -> dict[str, torch.Tensor]:
    """Return memory for what this rank can use of a checkpoint of `num_ranks` ranks that has `written`, by name.

    With another number of ranks that is nothing: whose states they were means nothing to these.
    """
    if num_ranks != world.size:
        return {}
    usable = [_cpu(world), _joined(world), *([_cuda(world)] if torch.cuda.is_available() else [])]
    return {
        name: torch.empty(tuple(written[name].size), dtype=torch.uint8) for name in usable if name in written
    }


def restore(world: World, state: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's generators to what there is of them in `state`; another one goes on as it is."""
    cpu, cuda = state.get(_cpu(world)), state.get(_cuda(world))
    if _joined(world) in state:
        cpu, cuda = state[_joined(world)].split_with_sizes(_sizes(state[_joined(world)]))
    if cpu is not None:
        torch.set_rng_state(cpu)
    if cuda is not None and cuda.numel() and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def _sizes(joined: torch.Tensor) -> list[int]:
    num_cpu = torch.get_rng_state().numel()
    return [num_cpu, joined.numel() - num_cpu]


def _cpu(world: World) -> str:
    return f"random.cpu.rank_{world.rank}"


def _cuda(world: World) -> str:
    return f"random.cuda.rank_{world.rank}"


def _joined(world: World) -> str:
    """Return the key of format 1: the CPU's state, followed by CUDA's where there was one."""
    return f"random.rank_{world.rank}"
