"""A run's processes from start to stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar, cast

from offbeat_trainer.cluster.placement import PlacementGroups
from offbeat_trainer.cluster.publisher import ClusterPublisher
from offbeat_trainer.cluster.ray_runtime import start_ray, stop_ray
from offbeat_trainer.cluster.rollout_group import RolloutGroup
from offbeat_trainer.cluster.train_group import TrainGroup
from offbeat_trainer.errors import together
from offbeat_trainer.watch.watchdog import GENERATION, Timeline, Watchdog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from offbeat_ckptsync.seams import Member
    from offbeat_trainer.cluster.placement import ClusterSpec

_Prepared = TypeVar("_Prepared")


class Cluster:
    """Ray, the training pool and the generation pool. `stop` undoes whatever was started, in any state. Satisfies `Joiner`.

    In colocated placement both pools have the same devices: before the weights change the replicas rest, a sync wakes
    them, and a replacement is started while nothing trains.
    """

    def __init__(
        self, spec: ClusterSpec, timeline: Timeline | None = None, watchdog: Watchdog | None = None
    ) -> None:
        """Start Ray; the pools are started by `start`, or each by its own.

        What replicas do is drawn on `timeline`. To `watchdog` every token is progress, and so is what moves on a rank.
        """
        self._spec = spec
        self._placement = PlacementGroups(spec)
        standing, shared = asyncio.Lock(), self._placement.shared
        self.timeline = Timeline() if timeline is None else timeline
        self.watchdog = Watchdog() if watchdog is None else watchdog
        self.rollout = RolloutGroup(
            spec,
            self._placement,
            self,
            self.timeline,
            devices_free=standing if shared else None,
            on_progress=lambda name: self.watchdog.progress(GENERATION, f"{name} made tokens"),
        )
        self._publisher: ClusterPublisher | None = None
        self.train = TrainGroup(
            spec,
            self._placement,
            standing=standing,
            make_room=self.rollout.rest if shared else None,
            watchdog=self.watchdog,
        )
        start_ray(spec.cluster, num_gpus=spec.num_gpus)

    async def start(self, prepare: Callable[[], Awaitable[_Prepared]]) -> _Prepared:
        """Start both pools, let `prepare` ready the training pool once its ranks have met, and return its result.

        Separate pools come up side by side. Shared devices are handed over: ranks, replicas, which then rest, `prepare`.
        """

        async def ready() -> _Prepared:
            await self.train.start()
            return await prepare()

        if not self._placement.shared:
            _, prepared = await together(
                {"start replicas": self.rollout.start(), "prepare training": ready()}
            )
            return cast("_Prepared", prepared)
        await self.train.start()
        await self.rollout.start()
        await self.rollout.rest()
        return await prepare()

    def publisher(self) -> ClusterPublisher:
        """Return the way from the one pool to the other; both must have been started."""
        self._publisher = ClusterPublisher(self.train, self.rollout, self._spec.train.sync)
        return self._publisher

    async def join(self, member: Member) -> bool:
        """See `Joiner.join`; the publisher does it, once there is one."""
        if self._publisher is None:
            return False
        await self._publisher.join(member)
        return True

    async def rescue(self) -> None:
        """See `Joiner.rescue`."""
        if self._publisher is not None:
            await self._publisher.rescue()

    async def stop(self) -> None:
        """End every process of the run."""
        await self.rollout.stop()
        self.train.stop()
        self._placement.release()
        stop_ray()
