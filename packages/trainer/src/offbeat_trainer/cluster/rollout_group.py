"""The generation pool as the driver sees it: replicas that come up side by side, and one way to complete a batch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from offbeat_rollout.pool import ReplicaPool
from offbeat_trainer.cluster.placement import release, reserve
from offbeat_trainer.cluster.replica_worker import ReplicaWorker
from offbeat_trainer.cluster.session import CPUS_PER_PROCESS
from offbeat_trainer.cluster.waits import answer, answers

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from offbeat_rollout import Completion, GenerateRequest, Health
    from offbeat_trainer.cluster.spec import ClusterSpec

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 20.0
MAX_CALLS = 1024  # of one replica at once; a call carries a whole batch, so this is never the limit


class RolloutGroup:
    """Starts the replicas and routes batches over those that serve an admitted version."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self.handles: dict[str, Any] = {}
        self._pool: ReplicaPool | None = None

    async def start(self) -> None:
        """Reserve devices and bring up all replicas; they serve nothing until their first sync."""
        spec = self._spec
        rollout = spec.rollout
        gpus = rollout.rollout.tensor_parallel_size if rollout.rollout.device == "cuda" else 0
        timeout_s = spec.cluster.start_timeout_s
        self._placement = reserve("rollout", rollout.num_replicas, gpus, timeout_s=timeout_s)
        actor_class = ray.remote(ReplicaWorker)
        for index in range(rollout.num_replicas):
            name = f"replica {index}"
            environment = rollout.environments[index] if rollout.environments else {}
            self.handles[name] = actor_class.options(
                num_cpus=CPUS_PER_PROCESS,
                num_gpus=gpus,
                max_restarts=0,
                max_concurrency=MAX_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, index),
                runtime_env={"env_vars": environment},
            ).remote(name, rollout, spec.train.sync, f"{spec.log_dir}/replica{index}.log")
        await answers(
            [handle.start.remote() for handle in self.handles.values()],
            owners=list(self.handles),
            what="load the model and become able to generate",
            timeout_s=timeout_s,
        )
        self._pool = ReplicaPool(
            [RemoteReplica(name, handle, spec.step_timeout_s) for name, handle in self.handles.items()],
            call_timeout_s=spec.step_timeout_s,
        )

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Complete a batch over all admitted replicas, in the order of `requests`."""
        assert self._pool is not None
        return await self._pool.generate_many(requests)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests wherever they are; they return with what they have."""
        assert self._pool is not None
        await self._pool.abort(request_ids)

    def admit(self, name: str, version: int) -> None:
        """Give the replica traffic: it serves `version`, verified."""
        assert self._pool is not None
        self._pool.admit(name, version)

    def admit_all(self, version: int) -> None:
        """Give every replica traffic at the version it was started with."""
        for name in self.handles:
            self.admit(name, version)

    def fence(self, name: str, reason: str) -> None:
        """Give the replica no more traffic."""
        assert self._pool is not None
        self._pool.fence(name, reason)

    async def stop(self) -> None:
        """End the replicas and give their devices back; safe to call twice, and before `start` ended."""
        for name, handle in self.handles.items():
            try:
                await answer(handle.stop.remote(), owner=name, what="stop", timeout_s=STOP_TIMEOUT_S)
            except Exception:
                log.warning("%s did not stop by itself", name, exc_info=True)
            ray.kill(handle)
        self.handles = {}
        if hasattr(self, "_placement"):
            release(self._placement)
            del self._placement


class RemoteReplica:
    """Satisfies `Replica`: forwards to the process of one replica."""

    def __init__(self, name: str, handle: Any, timeout_s: float) -> None:  # noqa: ANN401
        self._name = name
        self._handle = handle
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        """The replica's name."""
        return self._name

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Forward."""
        call = self._handle.generate_many.remote(requests)
        return await answer(call, owner=self._name, what="complete a batch", timeout_s=self._timeout_s)

    async def abort(self, request_ids: Collection[str]) -> None:
        """Forward."""
        call = self._handle.abort_requests.remote(request_ids)
        await answer(call, owner=self._name, what="abort requests", timeout_s=self._timeout_s)

    async def health(self) -> Health:
        """Forward."""
        return await answer(
            self._handle.health.remote(), owner=self._name, what="say how it is", timeout_s=self._timeout_s
        )
