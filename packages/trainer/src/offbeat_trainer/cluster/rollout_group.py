"""The generation pool as the driver sees it: replicas that are watched and replaced, and one way to complete a batch."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, cast

import ray

from offbeat_ckptsync.control.carried import CarriedMember
from offbeat_rollout import NoReplica
from offbeat_rollout.toolkit.pool import ReplicaPool
from offbeat_rollout.toolkit.registry import adapter_class
from offbeat_trainer.cluster.replicas import RemoteReplica, ReplicaStarter, Supplies
from offbeat_trainer.cluster.waits import answer, answers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Sequence

    from offbeat_ckptsync.seams import Member
    from offbeat_ckptsync.toolkit.ops import Call
    from offbeat_ckptsync.toolkit.wire import Json
    from offbeat_ckptsync.values import Registration
    from offbeat_rollout import Completion, GenerateRequest
    from offbeat_trainer.cluster.placement import ClusterSpec, PlacementGroups
    from offbeat_trainer.watch.watchdog import Timeline

log = logging.getLogger(__name__)

_REPLY_S = 10.0
FULL_HOUSES = 2
"""A replica is given so many times the requests it works on at once; the rest wait for whoever has room first."""
MAX_STARTS = 3
"""How often one loss is answered with a new process; who cannot even start is given up, with the reason."""


def to_replica(name: str, handle: Any, timeline: Timeline | None = None) -> Call:  # noqa: ANN401
    """Return the way to the replica `name` in the process `handle`, which has `sync_op`; pauses are drawn on its track.

    Its waits end with the process; their deadlines are the manager's, which name the phase.
    """

    async def call(op: str, request: Json) -> Json:
        what = f"do {op!r} of a weight sync"
        outcome: Json = await answer(
            handle.sync_op.remote(op, request), owner=name, what=what, timeout_s=None
        )
        if op == "flip" and "ok" in outcome and timeline is not None:
            flip = cast("dict[str, dict[str, Any]]", outcome["ok"])["flip"]
            timeline.past(name, "paused", flip["pause_s"], version=flip["version"])
        return outcome

    return call


class Joiner(Protocol):
    """Who brings a replacement to the version that is served."""

    async def join(self, member: Member) -> bool:
        """Bring a replica that has announced itself to the served version and admit it; raises if that fails.

        False where nothing was synced yet: the first sync is what it is ready for.
        """
        ...

    async def rescue(self) -> None:
        """Nobody serves any more: let in whoever waits to join."""
        ...


class RolloutGroup:
    """Starts the replicas and routes batches over those that serve an admitted version.

    A replica that dies, hangs or says it is not well is *lost*: its requests move to the others, and a new process is
    started in its place, brought to the served version and admitted. Where it was the only one, batches wait for that.
    One that was only silent in a sync (`set_aside`) is brought back if it answers within `cluster.health_timeout_s`.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        placement: PlacementGroups,
        joiner: Joiner,
        timeline: Timeline,
        *,
        devices_free: asyncio.Lock | None = None,
        on_progress: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Generate in `placement`; nothing is started yet. Each replica has a track of `timeline`; `on_progress` is a pool's.

        `joiner` brings replacements to the version that is served. Where devices are shared, `devices_free` is held while a
        replica starts.
        """
        self._spec = spec
        self._placement = placement
        self._starter = ReplicaStarter(spec, placement)
        self.devices_free = devices_free
        self.handles: dict[str, Any] = {}
        self.members: dict[str, Member] = {}  # as they announced themselves
        self.nodes: dict[str, str] = {}  # the machine of each replica
        self._supplies = Supplies(spec.rollout.rollout.model_path, spec.cluster.start_timeout_s)
        self._joiner = joiner
        self.lost: dict[str, str] = {}  # why; until the replacement is admitted
        self.replacing: set[str] = set()
        self._silent: set[str] = set()  # of these: whose process may go on, with the old weights whole
        self._replicas: dict[str, RemoteReplica] = {}
        self._pool: ReplicaPool | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._started_with: int | None = None
        self._timeline = timeline
        self._on_progress = on_progress

    async def start(self) -> None:
        """Reserve devices and bring up all replicas; they serve nothing until their first sync."""
        spec = self._spec
        await self._placement.reserve("rollout")
        for registration in await self._launch(self._starter.names):
            self._announced(registration)
        self._replicas = {
            name: RemoteReplica(name, handle, spec.step_timeout_s, self._timeline)
            for name, handle in self.handles.items()
        }
        self._pool = ReplicaPool(
            list(self._replicas.values()),
            stall_timeout_s=spec.step_timeout_s,
            max_running=FULL_HOUSES * spec.rollout.rollout.max_num_seqs,
            on_lost=self._on_lost,
            on_progress=self._on_progress,
        )
        self._spawn("watch replicas", self._watch(self._pool))

    async def _launch(self, names: Sequence[str]) -> list[Registration]:
        """Start a process for each of these replicas and let it load the model; return how they announce themselves."""
        timeout_s = self._spec.cluster.start_timeout_s
        handles = {name: self._starter.launch(name) for name in names}
        self.handles |= handles
        calls = [handle.node.remote() for handle in handles.values()]
        nodes = await answers(calls, owners=names, what="say where it is", timeout_s=timeout_s)
        self.nodes.update(zip(names, nodes, strict=True))
        for name, handle in handles.items():
            await self._supplies.bring(name, handle, self.nodes[name])
        return await answers(
            [handle.start.remote() for handle in handles.values()],
            owners=names,
            what="load the model and become able to generate",
            timeout_s=timeout_s,
        )

    @property
    def shares_devices(self) -> bool:
        """Whether replicas are on the devices of training ranks."""
        return self._placement.shared

    def ranks_beside(self, name: str) -> list[int]:
        """Return the training rank on the device of each rank of the replica `name`."""
        return self._placement.ranks_beside(self._starter.names.index(name))

    @property
    def serving(self) -> dict[str, int]:
        """Versions of the replicas that get traffic, by name."""
        return self._open().versions

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Complete a batch over all admitted replicas, in the order of `requests`.

        Raises:
            NoReplica: nobody may serve, and no replacement joined within `cluster.start_timeout_s`.
        """
        while True:
            try:
                return await self._open().generate_many(requests)
            except NoReplica:
                if not self.replacing:
                    raise
                await self.until(lambda: bool(self.serving))

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests wherever they are; they return with what they have."""
        await self._open().abort(request_ids)

    def admit(self, name: str, version: int) -> None:
        """Give the replica traffic: it serves `version`, verified."""
        self._open().admit(name, version)
        if self.lost.pop(name, None) is not None:
            log.warning("%s serves again, version %d on %s", name, version, self.nodes[name])
        self.replacing.discard(name)
        self.touch()

    def admit_all(self, version: int) -> None:
        """Give every replica traffic at the version it was started with; so for replacements, while nobody syncs."""
        self._started_with = version
        for name in self.handles:
            self.admit(name, version)

    def lose(self, name: str, reason: str) -> None:
        """Give the replica up for dead: its requests go elsewhere, and it is replaced."""
        self._open().lose(name, reason)

    def set_aside(self, name: str, reason: str) -> None:
        """Go on without a replica that was silent in a sync: its requests go elsewhere, and it is brought back or replaced."""
        if name not in self.replacing:
            self._silent.add(name)
        self.lose(name, reason)

    async def unwell(self, names: Collection[str]) -> dict[str, str]:
        """Ask these replicas for their health now; who is not well or late is lost, and returned with the reason."""
        reasons = dict(zip(names, await asyncio.gather(*map(self._reason_unwell, names)), strict=True))
        unwell = {name: reason for name, reason in reasons.items() if reason}
        for name, reason in unwell.items():
            self.lose(name, reason)
        return unwell

    async def rest(self) -> None:
        """Let the devices be the trainer's until the next sync: nothing is generated, memory is given back where it can be.

        A replica that cannot is lost: what is left of it goes, and with it its memory.
        """
        resting = [name for name in self.handles if name not in self.replacing]
        failures = await asyncio.gather(
            *(self._replicas[name].rest() for name in resting), return_exceptions=True
        )
        for name, failure in zip(resting, failures, strict=True):
            if isinstance(failure, Exception):
                self.lose(name, f"could not rest: {failure}")

    def touch(self) -> None:
        """Let those who wait with `until` look again."""
        self._changed.set()

    async def until(self, met: Callable[[], bool]) -> None:
        """Wait for something that a replacement will bring about.

        Raises:
            NoReplica: no replacement is under way any more, or it took longer than `cluster.start_timeout_s`.
        """
        limit_s = self._spec.cluster.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not met():
                    if not self.replacing:
                        raise NoReplica(f"no replica is left, and none replaced: {self._open().describe()}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise NoReplica(
                f"waited {limit_s:g} s for {', '.join(sorted(self.replacing))} to be replaced: {self._open().describe()}; "
                "the log of the replica says what it was doing. If it was only slow, raise trainer.step_timeout_s"
            ) from error

    async def stop(self) -> None:
        """End the replicas, those that still start at once; safe to call twice, and before `start` ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        handles, self.handles = self.handles, {}
        limit_s = stop_limit_s(self._spec.rollout.adapter_name)
        up = [name for name in handles if name in self.members]
        await asyncio.gather(*(_end(name, handles[name], limit_s) for name in up))
        for handle in handles.values():
            ray.kill(handle)

    async def _watch(self, pool: ReplicaPool) -> None:
        cluster = self._spec.cluster
        while True:
            try:
                await pool.watch(cluster.health_period_s, cluster.health_timeout_s)
            except Exception:
                log.exception("watching the replicas failed; going on")

    def _on_lost(self, name: str, reason: str) -> None:
        if name in self.replacing or name not in self.handles:
            return
        then = "it is waited for" if name in self._silent else "a new one is started in its place"
        log.warning("%s is lost (%s); %s", name, reason, then)
        self._timeline.lost.append(f"{name}: {reason}")
        self._timeline.mark(name, f"lost: {reason}")
        self.lost[name] = reason
        self.replacing.add(name)
        self._spawn(f"replace {name}", self._replace(name))
        if not self.serving:
            self._spawn("rescue", self._joiner.rescue())

    async def _replace(self, name: str) -> None:
        why = self.lost[name]
        try:
            if await self._came_back(name):
                return
            for _ in range(MAX_STARTS):
                try:
                    with self._timeline.span(name, "start anew"):
                        await self._start_anew(name)
                except Exception as error:
                    log.exception("%s could not be replaced", name)
                    why = str(error) or type(error).__name__
                    self._open().fence(name, f"lost, and not replaced: {why}")
                else:
                    return
            log.error("%s is given up after %d attempts to replace it: %s", name, MAX_STARTS, why)
            self.replacing.discard(name)
        finally:
            self.touch()

    async def _came_back(self, name: str) -> bool:
        """Let a replica in again that was silent in a sync, once it answers; False where it does not, or was lost otherwise."""
        if name not in self._silent:
            return False
        self._silent.remove(name)
        if self.devices_free is not None:
            return False  # its devices are the trainer's, which waits for no silent process
        if why := await self._reason_unwell(name):
            log.warning("%s does not come back (%s); a new one is started in its place", name, why)
            return False
        with self._timeline.span(name, "catch up"):
            try:
                await self._let_in(name)
            except Exception:
                log.exception("%s cannot catch up; a new one is started in its place", name)
                return False
        return True

    async def _start_anew(self, name: str) -> None:
        ray.kill(self.handles[name])  # one that hangs must not hold its devices
        async with nullcontext() if self.devices_free is None else self.devices_free:
            [registration] = await self._launch([name])
            self._replicas[name].handle = self.handles[name]
            if self.devices_free is not None:
                await self._replicas[name].rest()
        self._announced(registration)
        await self._let_in(name)

    async def _let_in(self, name: str) -> None:
        """Bring a replica that has no traffic to what is served, and give it some."""
        if await self._joiner.join(self.members[name]):
            return
        if self._started_with is not None:
            self.admit(name, self._started_with)
        else:
            self.lost.pop(name)
            self.replacing.discard(name)

    def _announced(self, registration: Registration) -> None:
        name = registration.name
        call = to_replica(name, self.handles[name], self._timeline)
        self.members[name] = CarriedMember(registration, call)

    async def _reason_unwell(self, name: str) -> str:
        try:
            async with asyncio.timeout(self._spec.cluster.health_timeout_s):
                health = await self._replicas[name].health()
        except (ConnectionError, TimeoutError) as error:
            return str(error) or f"no answer within {self._spec.cluster.health_timeout_s:g} s"
        return "" if health.ok else health.detail or "said it is not well"

    def _open(self) -> ReplicaPool:
        assert self._pool is not None, "`start` comes first"
        return self._pool

    def _spawn(self, name: str, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)


def stop_limit_s(adapter_name: str) -> float:
    """Return how long a replica is waited for that was told to stop: longer than its engine takes at most."""
    return adapter_class(adapter_name).stop_timeout_s + _REPLY_S


async def _end(name: str, handle: Any, limit_s: float) -> None:  # noqa: ANN401
    try:
        await answer(handle.do.remote("stop"), owner=name, what="stop", timeout_s=limit_s)
    except Exception:
        log.warning("%s did not stop by itself", name, exc_info=True)
