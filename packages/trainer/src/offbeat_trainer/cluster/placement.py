"""Where processes go: one placement group per pool, reserved before any process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from offbeat_trainer.cluster.session import CPUS_PER_PROCESS
from offbeat_trainer.errors import PlanRefused

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


def bundles(num_processes: int, gpus_each: int) -> list[dict[str, float]]:
    """Return the resources of a pool's processes, one bundle each."""
    return [
        {"CPU": CPUS_PER_PROCESS, **({"GPU": gpus_each} if gpus_each else {})} for _ in range(num_processes)
    ]


def reserve(name: str, num_processes: int, gpus_each: int, *, timeout_s: float) -> PlacementGroup:
    """Reserve room for a pool, packed on as few hosts as possible.

    Raises:
        PlanRefused: the cluster did not have that much free within `timeout_s`.
    """
    group = placement_group(bundles(num_processes, gpus_each), strategy="PACK", name=name)
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise PlanRefused(
            f"the pool {name!r} needs {num_processes} processes with {gpus_each} GPU(s) each; within {timeout_s:g} s the "
            f"cluster had only {ray.available_resources()} free. Ask for fewer, or add devices"
        )
    return group


def release(group: PlacementGroup) -> None:
    """Give a pool's room back."""
    remove_placement_group(group)
