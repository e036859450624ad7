"""The faults of ckptsync's matrix over the carrier that a run uses: Ray's processes, calls and replacements, as they are.

Whoever fails, wherever, however: a replica has traffic only under a version whose weights it holds bit for bit, committed; and
the next version reaches everybody.
"""

import asyncio
import itertools
import json
import os
import signal
import sys

import pytest

from offbeat_ckptsync import SyncConfig, SyncFailed
from sync_faults.actors import bent
from sync_faults.hurt import SLOW_S, content_of, weights_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TIMEOUT_S = 600.0
DEADLINE_S = 20.0  # of a phase: what one that hangs costs
PHASES = ("begin", "transfer", "verify", "flip", "commit")
KINDS = ("killed", "hung", "slow", "corrupting")
CASES = [*itertools.product(("sender", "receiver"), PHASES, KINDS)]
CASES += [("manager", phase, "corrupting") for phase in PHASES]
USUAL = {
    ("receiver", "transfer", "killed"),
    ("receiver", "flip", "corrupting"),
    ("sender", "transfer", "killed"),
    ("manager", "verify", "corrupting"),
}


@pytest.fixture(scope="module")
def hurt_workers():
    """Put processes that can be hurt in the place of replicas and ranks; all around them is a run's own."""
    from ray import cloudpickle

    from offbeat_ckptsync.control.carried import Operations
    from offbeat_ckptsync.control.members import StagedCopy
    from offbeat_ckptsync.member.receiver import Receiver
    from offbeat_ckptsync.source.publisher import LocalSource, Publisher
    from offbeat_ckptsync.values import Registration, Seat
    from offbeat_rollout import Health
    from offbeat_trainer.cluster import replicas, train_group
    from offbeat_trainer.cluster.process import redirect_output
    from offbeat_trainer.cluster.replica_worker import ReplicaWorker
    from offbeat_trainer.cluster.train_worker import TrainWorker
    from sync_faults.hurt import (
        Arms,
        HurtMember,
        HurtPublisher,
        HurtWeights,
        LiveSink,
        faulty_transport,
    )

    class Replica(ReplicaWorker):
        def __init__(self, name, spec, sync, log_path, *, shared=False):
            redirect_output(log_path)
            self._name, self._sync = name, sync
            self._model_path = spec.rollout.model_path

        async def start(self):
            self.arms = HurtMember.arms = Arms()
            self.sink = LiveSink(self.arms)
            self.receiver = Receiver(Seat(member=self._name), self.sink)
            member = HurtMember(
                self.receiver,
                faulty_transport(self._sync, self.arms, sends=False),
                canary=self.sink.canary,
                copies=LocalSource(Publisher(StagedCopy(self.receiver), self._sync)),
            )
            self._operations = Operations(self._name, member=member)
            return Registration(name=self._name, role=self._operations.role)

        async def health(self):
            return Health(ok=True, version=self.receiver.version, num_running=0)

        async def stop(self):
            pass

        async def arm(self, phase, kind):
            self.arms.arm(phase, kind)

        async def holds(self):
            status = self.receiver.status()
            return status.version, content_of(self.sink.weights), status.committed

    class Rank(TrainWorker):
        def build(self, *_):
            self.arms = Arms()
            self.weights = HurtWeights(self.arms)
            transport = faulty_transport(self._spec.sync, self.arms, sends=True)
            self._sender = HurtPublisher(self.weights, self._spec.sync, self.arms, transport=transport)

        def arm(self, phase, kind):
            self.arms.arm(phase, kind)

        def take(self, seed):
            self.weights.weights = weights_of(seed)

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "ReplicaWorker", Replica)
        patch.setattr(train_group, "TrainWorker", Rank)
        yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Site:
    """A run's pools and publisher, and the version that was published last."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.publisher = cluster.publisher()
        self.version = 0
        self.struck = 0  # the process that is hung

    @property
    def rank(self):
        return self.cluster.train._workers[0]

    async def plant(self, role, phase, kind, pid_of):
        replica = self.cluster.rollout.handles["replica 1"]
        if role == "receiver":
            await replica.arm.remote(phase, kind)
            self.struck = await pid_of(replica)
        elif role == "sender" and (kind == "corrupting" or phase in ("begin", "transfer")):
            await self.rank.arm.remote(phase, kind)
            self.struck = await pid_of(self.rank)
        else:  # when the second replica is asked to do its part: the first was asked already
            self._strike_when_asked(phase, kind, await pid_of(self.rank))

    def _strike_when_asked(self, phase, kind, pid):
        member = self.publisher._manager._members["replica 1"]
        call, self.struck = member.call, pid

        async def struck(op, request):
            if op != phase:
                return await call(op, request)
            member.call = call
            if kind == "corrupting":
                return await call(op, json.loads(bent(json.dumps(request))))
            os.kill(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            if kind == "slow":
                asyncio.get_running_loop().call_later(SLOW_S, os.kill, pid, signal.SIGCONT)
            return await call(op, request)

        member.call = struck

    async def publish(self):
        """Publish new weights; return who serves them now, or nobody where it failed."""
        self.version += 1
        await self.rank.take.remote(self.version)
        self.cluster.train.updates += 1  # as an update does
        try:
            return [*(await asyncio.wait_for(self.publisher.publish(self.version), TIMEOUT_S)).members]
        except SyncFailed:
            self.version -= 1
            return []

    async def heal(self, role, kind):
        """Let a sender that was hung go on, and start one anew that is dead; replicas are replaced by the run itself."""
        if role == "sender" and kind == "hung":
            os.kill(self.struck, signal.SIGCONT)
        if role == "sender" and kind == "killed":
            self.cluster.train.stop()
            await self.cluster.train.start()
            await self.cluster.train.build(None)

    async def check(self, told):
        """Whoever has traffic holds what its version is, committed; and those who are `told` hold the last version."""
        serving = self.cluster.rollout.serving
        for name, version in serving.items():
            held = await asyncio.wait_for(self.cluster.rollout.handles[name].holds.remote(), TIMEOUT_S)
            assert held == (version, content_of(weights_of(version)), True), name
        assert {name: serving[name] for name in told if name in serving} == dict.fromkeys(
            (name for name in told if name in serving), self.version
        )


@pytest.fixture(scope="module")
async def site(tmp_path_factory, started, hurt_workers):
    sync = SyncConfig(
        bucket_mib=1 / 16, canary=True, **{f"{phase}_timeout_s": DEADLINE_S for phase in PHASES}
    )
    folder = tmp_path_factory.mktemp("faults")
    async with started(
        folder,
        num_replicas=2,
        sync=sync,
        health_period_s=1.0,
        health_timeout_s=10.0,
        start_timeout_s=TIMEOUT_S,
    ) as cluster:
        yield Site(cluster)


@pytest.mark.parametrize(
    ("role", "phase", "kind"),
    [pytest.param(*case, marks=() if case in USUAL else pytest.mark.deep) for case in CASES],
)
async def test_traffic_goes_to_whole_and_committed_versions_alone(site, until, pid_of, role, phase, kind):
    if site.version == 0:
        assert sorted(await site.publish()) == ["replica 0", "replica 1"]
    before = site.version
    await site.plant(role, phase, kind, pid_of)
    told = await site.publish()
    assert site.version == (before + 1 if told else before)
    if kind == "slow":
        assert sorted(told) == ["replica 0", "replica 1"]
    await site.check(told)
    await site.heal(role, kind)
    while site.version < before + 2:
        assert await site.publish(), "the sync after a fault failed"
    both = {"replica 0": site.version, "replica 1": site.version}
    await until(
        lambda: site.cluster.rollout.serving == both, "both replicas to serve the version after the fault"
    )
    await site.check([*both])
