"""Replicas as the driver sees them: how one is started, and how it is spoken to."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import ray

from offbeat_rollout import RolloutError
from offbeat_rollout.registry import adapter_environment
from offbeat_rollout.slots import Replica
from offbeat_trainer.cluster.replica_worker import ReplicaWorker
from offbeat_trainer.cluster.session import CPUS_PER_PROCESS
from offbeat_trainer.cluster.waits import answer
from offbeat_trainer.learner import carried

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from offbeat_rollout import Completion, GenerateRequest
    from offbeat_trainer.cluster.placement import PlacementGroups
    from offbeat_trainer.cluster.replica_worker import Ended
    from offbeat_trainer.cluster.spec import ClusterSpec
    from offbeat_trainer.watch.timeline import Timeline

_DONE = {"abort": "abort requests", "health": "say how it is"}
MAX_CALLS = 1024  # of one replica at once; a call carries a whole batch, so this is never the limit


class ReplicaStarter:
    """Starts processes for the replicas of a run: a replacement takes the bundle of the one it follows."""

    def __init__(self, spec: ClusterSpec, placement: PlacementGroups) -> None:
        """Start nothing yet."""
        self._spec = spec
        self._placement = placement
        self.names = [f"replica {index}" for index in range(spec.rollout.num_replicas)]

    def launch(self, name: str) -> Any:  # noqa: ANN401
        """Return the handle of a new process for replica `name`, which has still to load its model."""
        spec, index = self._spec, self.names.index(name)
        rollout, bundle = spec.rollout, self._placement.replica(index)
        environment = rollout.environments[index] if rollout.environments else {}
        if rollout.shares_cores:
            threads = self._placement.replica_threads(index)
            rollout = replace(rollout, rollout=replace(rollout.rollout, cpu_threads=threads))
            environment = adapter_environment(rollout.adapter_name, rollout.rollout)
        return (
            ray.remote(ReplicaWorker)
            .options(
                num_cpus=CPUS_PER_PROCESS,
                num_gpus=bundle.num_gpus,
                max_restarts=0,
                max_concurrency=MAX_CALLS,
                scheduling_strategy=bundle.strategy,
                runtime_env={"env_vars": {**environment, **bundle.environment}},
            )
            .remote(
                name,
                rollout,
                spec.train.sync,
                f"{spec.log_dir}/replica{index}.log",
                shared=self._placement.shared,
            )
        )


class _Batch:
    """The requests of one call, and who waits for their completions."""

    def __init__(self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None]) -> None:
        self.requests = requests
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = ended
        self._num_left = len(requests)

    def take(self, result: Completion | RolloutError) -> None:
        """Hand a completion on; the last one, or an error, ends the call. Nothing is handed on once nobody waits."""
        if isinstance(result, RolloutError):
            self.end(result)
        elif not self.done.done():
            self._ended(result)
            self._num_left -= 1
            if not self._num_left:
                self.end()

    def end(self, error: Exception | None = None) -> None:
        """Let the call return, or raise `error`; harmless once it has."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class RemoteReplica:
    """Satisfies `Replica`: forwards to the process of one replica. A replacement's `handle` takes the old one's place."""

    abort = carried(Replica.abort)
    health = carried(Replica.health)

    def __init__(self, name: str, handle: Any, timeout_s: float, timeline: Timeline) -> None:  # noqa: ANN401
        self.handle = handle
        self._timeline = timeline
        self._name = name
        self._timeout_s = timeout_s
        self._calls = count()
        self._outgoing: list[_Batch] = []
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """The replica's name."""
        return self._name

    async def generate_many(
        self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None]
    ) -> None:
        """Send `requests`, in one message with all that other calls send in this turn of the event loop.

        How long it may take is the pool's to say, by progress.
        """
        batch = _Batch(requests, ended)
        self._outgoing.append(batch)
        if len(self._outgoing) == 1:
            sending = asyncio.create_task(self._send(), name=f"complete at {self._name}")
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        await batch.done

    async def _send(self) -> None:
        """Send what waits and hand out what comes back; the call is drawn on the replica's track."""
        batches, self._outgoing = self._outgoing, []
        sent = [batch.requests for batch in batches]
        try:
            calls = self.handle.completions.options(num_returns="streaming").remote(sent)
            with self._timeline.overlapping(
                self._name, "complete", f"{self._name}/{next(self._calls)}", requests=sum(map(len, sent))
            ):
                while True:
                    some = await answer(
                        _next(calls), owner=self._name, what="complete a batch", timeout_s=None
                    )
                    if some is None:
                        break
                    for place, result in some:
                        batches[place].take(result)
            for batch in batches:
                batch.end()
        except Exception as error:  # noqa: BLE001 - raised by each of the calls that wait
            for batch in batches:
                batch.end(error)

    async def carry(self, method: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - see `Carrier`
        """Have the engine over there do `method`."""
        assert not kwargs
        return await self._answer(self.handle.do.remote(method, *args), _DONE[method])

    async def rest(self) -> None:
        """Let it stop generating and give its device memory back, until the next sync."""
        await self._answer(self.handle.rest.remote(), "rest")

    async def _answer(self, call: Awaitable[Any], what: str) -> Any:  # noqa: ANN401
        return await answer(call, owner=self._name, what=what, timeout_s=self._timeout_s)


async def _next(calls: AsyncIterator[Awaitable[list[Ended]]]) -> list[Ended] | None:
    """Return what comes next of a streaming call, or None at its end."""
    try:
        reference = await anext(calls)
    except StopAsyncIteration:
        return None
    return await reference
