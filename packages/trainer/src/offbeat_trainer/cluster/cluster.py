"""A run's processes from start to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat_trainer.cluster.rollout_group import RolloutGroup
from offbeat_trainer.cluster.session import start_ray, stop_ray
from offbeat_trainer.cluster.train_group import TrainGroup
from offbeat_trainer.cluster.weights import ClusterPublisher

if TYPE_CHECKING:
    from offbeat_trainer.cluster.spec import ClusterSpec
    from offbeat_trainer.timeline import Timeline


class Cluster:
    """Ray, the training pool and the generation pool. `stop` undoes whatever was started, in any state."""

    def __init__(self, spec: ClusterSpec) -> None:
        """Start Ray; the pools are started by their own `start`, side by side if wanted."""
        self._spec = spec
        self.train = TrainGroup(spec)
        self.rollout = RolloutGroup(spec)
        start_ray(spec.cluster, num_gpus=spec.num_gpus)

    def publisher(self) -> ClusterPublisher:
        """Return the way from the one pool to the other; both must have been started."""
        return ClusterPublisher(self.train, self.rollout, self._spec.train.sync)

    def draw_on(self, timeline: Timeline) -> None:
        """Draw what each replica does on `timeline`."""
        self.rollout.draw_on(timeline)

    async def stop(self) -> None:
        """End every process of the run."""
        await self.rollout.stop()
        self.train.stop()
        stop_ray()
