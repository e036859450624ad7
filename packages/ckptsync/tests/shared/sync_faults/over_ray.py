# pyright: basic, reportPrivateImportUsage=false
"""Replicas and training ranks of a run that can be hurt, in processes of Ray; all around them is a run's own."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offbeat_ckptsync.control.carried import Operations
from offbeat_ckptsync.control.members import StagedCopy
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.values import RankId, Registration
from offbeat_rollout import Health, RolloutConfig
from offbeat_trainer import Grpo, GrpoConfig
from offbeat_trainer.cluster import replicas, train_group
from offbeat_trainer.cluster.cluster import Cluster
from offbeat_trainer.cluster.placement import ClusterSpec, RolloutSpec, TrainSpec
from offbeat_trainer.cluster.replicas import ReplicaWorker
from offbeat_trainer.cluster.train_group import TrainWorker
from offbeat_trainer.cluster.waits import redirect_output
from offbeat_trainer.config import ClusterConfig
from sync_faults.hurt import (
    Arms,
    HurtMember,
    HurtSender,
    HurtWeights,
    LiveSink,
    content_of,
    faulty_transport,
    weights_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator
    from pathlib import Path

    from offbeat_ckptsync.toolkit.config import SyncConfig
    from offbeat_ckptsync.toolkit.wire import Json

TIMEOUT_S = 600.0
"""For what only a defect uses up."""


class Replica(ReplicaWorker):
    """Holds weights and generates nothing."""

    def __init__(
        self, name: str, spec: RolloutSpec, sync: SyncConfig, log_path: str, *, shared: bool = False
    ) -> None:
        redirect_output(log_path)
        self._name, self._sync = name, sync
        self._model_path = spec.rollout.model_path
        self._engine: Any = self  # as far as it is asked for: `health` and `stop`

    async def start(self) -> Registration:
        """Be there with the weights of version 0."""
        self.arms = HurtMember.arms = Arms()
        self.sink = LiveSink(self.arms)
        self.receiver = Receiver(RankId(member=self._name), self.sink)
        member = HurtMember(
            self.receiver,
            faulty_transport(self._sync, self.arms, sends=False),
            canary=self.sink.canary,
            copies=LocalSource(Sender(StagedCopy(self.receiver), self._sync)),
            gate=NO_TRAFFIC,
        )
        self._operations = Operations(self._name, member=member)
        return Registration(name=self._name, role=self._operations.role)

    async def health(self) -> Health:
        """Be well."""
        return Health(ok=True, version=self.receiver.version, num_running=0)

    async def stop(self) -> None:
        """Have nothing to stop."""

    async def arm(self, phase: str, kind: str) -> None:
        """Plant a fault."""
        self.arms.arm(phase, kind)

    async def kill_at(self, num_bytes: int, delay_s: float) -> None:
        """Kill itself in the next sync, `delay_s` after so many bytes."""
        self.arms.kill_at = num_bytes, delay_s

    async def holds(self) -> tuple[int, str, bool]:
        """Return the version, `content_of` the weights, and whether they are committed."""
        status = self.receiver.status()
        return status.version, content_of(self.sink.weights), status.committed


class Rank(TrainWorker):
    """Has weights to send and trains nothing."""

    def build(self, engines: object) -> None:
        """Have the weights of version 0."""
        self.arms = Arms()
        self.weights = HurtWeights(self.arms)
        self.ops: Counter[str] = Counter()
        transport = faulty_transport(self._spec.sync, self.arms, sends=True)
        self._sender = HurtSender(self.weights, self._spec.sync, self.arms, transport=transport)

    def sync_op(self, op: str, request: Json) -> Json:
        """Do it, and count it."""
        self.ops[op] += 1
        return super().sync_op(op, request)

    def asked(self) -> dict[str, int]:
        """Return how often it was asked for each operation of a source."""
        return dict(self.ops)

    def arm(self, phase: str, kind: str) -> None:
        """Plant a fault."""
        self.arms.arm(phase, kind)

    def take(self, seed: int) -> None:
        """Hold `weights_of(seed)`."""
        self.weights.weights = weights_of(seed)

    def kill_at(self, num_bytes: int, delay_s: float) -> None:
        """Kill itself in the next sync, `delay_s` after so many bytes."""
        self.arms.kill_at = num_bytes, delay_s


@contextlib.contextmanager
def in_place() -> Generator[None]:
    """Let a run start these in the place of its own replicas and ranks."""
    own = replicas.ReplicaWorker, train_group.TrainWorker
    replicas.ReplicaWorker, train_group.TrainWorker = Replica, Rank
    try:
        yield
    finally:
        replicas.ReplicaWorker, train_group.TrainWorker = own


class Site:
    """A run's pools and publisher, and the version that was published last."""

    def __init__(self, cluster: Cluster) -> None:
        """Drive a cluster of such processes."""
        self.cluster = cluster
        self.publisher = cluster.publisher()
        self.version = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls,
        folder: Path,
        sync: SyncConfig,
        *,
        num_replicas: int = 2,
        **cluster: Any,
    ) -> AsyncGenerator[Site]:
        """Start one rank and the replicas, with settings of `cluster`, and stop them in the end."""
        train = TrainSpec(
            engine_name="fsdp2",
            device="cpu",
            num_ranks=1,
            threads_per_rank=1,
            algorithm=Grpo(config=GrpoConfig()),
            checkpoint_dir=str(folder),
            keep_checkpoints=1,
            collective_timeout_s=TIMEOUT_S,
            sync=sync,
        )
        rollout = RolloutSpec(
            adapter_name="hf",
            rollout=RolloutConfig(model_path=str(folder), max_model_len=2),
            num_replicas=num_replicas,
        )
        spec = ClusterSpec(
            cluster=replace(
                ClusterConfig(object_store_mib=128),
                **{"start_timeout_s": TIMEOUT_S, "health_timeout_s": 30.0, **cluster},
            ),
            train=train,
            rollout=rollout,
            log_dir=str(folder / "logs"),
            step_timeout_s=TIMEOUT_S,
        )
        with in_place():
            started = Cluster(spec)
            try:
                await started.start(lambda: started.train.build(None))  # type: ignore[arg-type]
                yield cls(started)
            finally:
                await started.stop()

    @property
    def rank(self) -> Any:
        """The training rank."""
        return self.cluster.train._workers[0]

    async def publish(self, gathered: Callable[[], None] | None = None) -> list[str]:
        """Publish new weights; return who serves them now (`report` says more), or nobody where it failed."""
        self.version += 1
        await self.rank.take.remote(self.version)
        self.cluster.train.updates += 1  # as an update does
        try:
            self.report = await self.publisher.publish(self.version, gathered)
            return [*self.report.members]
        except SyncFailed:
            self.version -= 1
            self.cluster.train.updates -= 1
            return []

    async def new_rank(self) -> None:
        """Start the training rank anew."""
        self.cluster.train.stop()
        await self.cluster.train.start()
        await self.cluster.train.build(None)  # type: ignore[arg-type]

    async def held(self, dead: str = "") -> dict[str, tuple[int, str, bool]]:
        """Return what each replica that has traffic holds, but for one that is known to be `dead`; see `Replica.holds`."""
        handles = self.cluster.rollout.handles
        names = [name for name in self.cluster.rollout.serving if name != dead]
        return {name: await handles[name].holds.remote() for name in names}
