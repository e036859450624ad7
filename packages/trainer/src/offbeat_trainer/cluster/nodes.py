"""The machines of a run, by the addresses that Ray knows them by: which of them is whose, and where processes meet."""

# Ray's utilities have no types.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import ray
from ray.util import get_node_ip_address

from offbeat_ckptsync.store import is_loopback
from offbeat_trainer.errors import PlanRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOOPBACK = "127.0.0.1"


def this_node() -> str:
    """Return the address of the machine that this process runs on."""
    return str(get_node_ip_address())


def own_host() -> str:
    """Return where others reach a server of this process: loopback where Ray has this machine alone."""
    machines = [name for name in ray.cluster_resources() if name.startswith("node:") and name[-1].isdigit()]
    return this_node() if len(machines) > 1 else LOOPBACK


def beside_the_driver() -> dict[str, float]:
    """Return what a process asks of Ray to run on the driver's machine; nothing where that is none of Ray's."""
    resource = f"node:{this_node()}"
    return {resource: 0.001} if resource in ray.cluster_resources() else {}


def cores_of_machines() -> dict[str, int]:
    """Return how many cores Ray counts on each machine that lives."""
    return {
        str(node["NodeManagerAddress"]): int(node["Resources"].get("CPU", 1))
        for node in ray.nodes()
        if node["Alive"]
    }


def even_shares(places: Sequence[str], cores: Mapping[str, int], *, taken: int = 0) -> list[int]:
    """Return how many threads each process computes with that runs at `places`, one machine for each: at least one.

    It is an even share of its machine's `cores` but for the `taken` ones there.
    """
    count = Counter(places)
    return [max(1, (cores.get(place, 1) - taken) // count[place]) for place in places]


def meeting_host(setting: str, host_node: str, others: Mapping[str, str]) -> str:
    """Return the address of `host_node` at which `others`, machines by process, meet a process there.

    Without a setting that is loopback while all are on one machine, else what Ray knows that machine by.

    Raises:
        PlanRefused: `setting` is loopback, and somebody is elsewhere.
    """
    apart = {name: node for name, node in others.items() if node != host_node}
    if not setting:
        return host_node if apart else LOOPBACK
    if apart and is_loopback(setting):
        name, node = next(iter(apart.items()))
        raise PlanRefused(
            f"cluster.rendezvous_host={setting} is loopback, but {name} is on another machine ({node}; training rank 0 is on "
            f"{host_node}): leave it empty, or let it be an address of {host_node} that all machines reach"
        )
    return setting
