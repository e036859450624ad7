"""Where processes go: room for both pools, reserved before any process starts, apart or shared.

What a cluster is told: plain values, so that they travel to the processes as they are.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from offbeat_ckptsync.toolkit.store import is_loopback
from offbeat_trainer.cluster.ray_runtime import CPUS_PER_PROCESS
from offbeat_trainer.config import Placement
from offbeat_trainer.errors import PlanRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ray.util.placement_group import PlacementGroup

    from offbeat_ckptsync import SyncConfig
    from offbeat_rollout import RolloutConfig
    from offbeat_trainer.algorithms.interface import Algorithm
    from offbeat_trainer.config import AlgorithmConfig, ClusterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """The training pool. The engines' own configs come with `TrainGroup.build`.

    Each trained role has a folder of its own in `checkpoint_dir`.
    `threads_per_rank` 0: an even share of the cores of the rank's own machine, but for `taken_cores`, which replicas use
    meanwhile, spread over all machines.
    """

    engine_name: str
    device: str
    num_ranks: int
    threads_per_rank: int
    algorithm: Algorithm[AlgorithmConfig]
    checkpoint_dir: str
    keep_checkpoints: int
    collective_timeout_s: float
    sync: SyncConfig
    taken_cores: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """The generation pool: equal replicas. `recompute_kv`: what goes on through a sync is computed anew after it.

    With `shares_cores`, colocated, each replica computes with an even share of the cores of its own machine.
    """

    adapter_name: str
    rollout: RolloutConfig
    num_replicas: int
    recompute_kv: bool = False
    shares_cores: bool = False
    environments: tuple[dict[str, str], ...] = ()  # one per replica: what its library reads at import


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A whole run's processes."""

    cluster: ClusterConfig
    train: TrainSpec
    rollout: RolloutSpec
    log_dir: str
    step_timeout_s: float
    num_gpus: int = 0  # of this machine, for a private Ray


# Ray's utilities have no types.


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


Pool = Literal["train", "rollout", "shared"]
_LOOK_S = 0.02  # between two looks whether Ray has reserved what was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementBundle:
    """Where one process runs: what it asks of Ray, and what its environment must say of its devices."""

    strategy: PlacementGroupSchedulingStrategy
    num_gpus: int
    environment: dict[str, str] = field(default_factory=dict[str, str])


class PlacementGroups:
    """The devices of a run. In separate placement each pool has its own; colocated, rank i and its replica share one.

    Colocated on GPUs, Ray gives each device to its rank. A replica, which may span several, is put beside the first of
    its ranks and told their devices: it is started after them.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        """Reserve nothing yet."""
        self._spec = spec
        self._groups: dict[Pool, PlacementGroup] = {}
        self._devices: list[str] = []  # of each rank: what CUDA_VISIBLE_DEVICES says there
        self._nodes: list[str] = []  # of each rank

    @property
    def shared(self) -> bool:
        """Whether both pools are in one room."""
        return self._spec.cluster.placement is Placement.COLOCATED

    def rank(self, index: int) -> PlacementBundle:
        """Return the bundle of training rank `index`, once `reserve` has its room."""
        gpus = 1 if self._spec.train.device == "cuda" else 0
        return PlacementBundle(
            strategy=self._bundle("shared" if self.shared else "train", index), num_gpus=gpus
        )

    def replica(self, index: int) -> PlacementBundle:
        """Return the bundle of replica `index`, once `reserve` has its room.

        Raises:
            PlanRefused: it shares the devices of ranks that have not been started.
        """
        width, gpus = self._width, self._gpus_of_a_replica
        if not self.shared:
            return PlacementBundle(strategy=self._bundle("rollout", index), num_gpus=gpus)
        strategy = self._bundle("shared", index * width)
        if not gpus:
            return PlacementBundle(strategy=strategy, num_gpus=0)
        mine = self._devices[index * width : (index + 1) * width]
        if len(mine) < width:
            raise PlanRefused(
                f"replica {index} shares the devices of training ranks {index * width} to {(index + 1) * width - 1}, and "
                f"{len(self._devices)} rank(s) have been started; colocated replicas start after their ranks"
            )
        return PlacementBundle(
            strategy=strategy, num_gpus=0, environment={"CUDA_VISIBLE_DEVICES": ",".join(mine)}
        )

    def ranks_beside(self, index: int) -> list[int]:
        """Return the training rank on the device of each rank of replica `index`; without GPUs ranks may be fewer, and take turns."""
        width, ranks = self._width, self._spec.train.num_ranks
        return [device % ranks for device in range(index * width, (index + 1) * width)]

    def ranks_hold(self, devices: Sequence[str], nodes: Sequence[str]) -> None:
        """Note the devices that Ray gave to the ranks, in rank order, and the machines that they are on."""
        self._devices, self._nodes = list(devices), list(nodes)

    def replica_threads(self, index: int) -> int:
        """Return the even share of its machine's cores for each process of replica `index`, which is beside its ranks."""
        everybody = range(self._spec.rollout.num_replicas)
        places = [self._nodes[rank] for one in everybody for rank in self.ranks_beside(one)]
        return even_shares(places, cores_of_machines())[index * self._width]

    def release(self) -> None:
        """Give all room back; safe to call twice."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()

    @property
    def _width(self) -> int:
        return self._spec.rollout.rollout.tensor_parallel_size

    @property
    def _gpus_of_a_replica(self) -> int:
        return self._width if self._spec.rollout.rollout.device == "cuda" else 0

    async def reserve(self, pool: Pool) -> None:
        """Reserve the devices of "train" or "rollout", unless it has them; on a busy cluster that may take minutes.

        "PACK" takes as few machines as possible, "SPREAD" as many. The event loop goes on meanwhile, for Ctrl-C above all.

        Raises:
            PlanRefused: the cluster did not have that much free within `cluster.start_timeout_s`.
        """
        pool = "shared" if self.shared else pool
        if pool in self._groups:
            return
        bundles, timeout_s = self._bundles(pool), self._spec.cluster.start_timeout_s
        strategy = "SPREAD" if pool == "rollout" and not self._gpus_of_a_replica else "PACK"
        group = self._groups[pool] = placement_group(bundles, strategy=strategy, name=pool)
        try:
            async with asyncio.timeout(timeout_s):
                while placement_group_table(group)["state"] != "CREATED":  # noqa: ASYNC110 - Ray sets no event
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            remove_placement_group(self._groups.pop(pool))
            raise PlanRefused(
                f"the pool {pool!r} needs {len(bundles)} x {bundles[0]}; within {timeout_s:g} s the cluster had only "
                f"{ray.available_resources()} free. Ask for fewer, or add devices"
            ) from error

    def _bundle(self, pool: Pool, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._groups[pool], index)

    def _bundles(self, pool: Pool) -> list[dict[str, float]]:
        ranks, replicas = self._spec.train.num_ranks, self._spec.rollout.num_replicas
        gpu = 1 if self._spec.train.device == "cuda" else 0
        # Cores are not reserved, so on CPU any machine would do: ranks stay where the run folder is.
        beside = {} if gpu else beside_the_driver()
        match pool:
            case "train":
                return [_bundle(1, gpu) | beside] * ranks
            case "rollout":
                return [_bundle(1, self._gpus_of_a_replica)] * replicas
            case "shared":
                return [_bundle(2, gpu) | beside] * max(ranks, replicas * self._width)


def _bundle(num_processes: int, gpus: int) -> dict[str, float]:
    return {"CPU": num_processes * CPUS_PER_PROCESS, **({"GPU": gpus} if gpus else {})}
