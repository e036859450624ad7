"""Two real replicas on Ray: the manager reads what each serves, and fences one by its name."""

import asyncio

import pytest

from offbeat_ckptsync import SupervisedMember, SyncConfig
from offbeat_engine import EngineConfig, ModelConfig, OptimizerConfig
from offbeat_engine.testing import make_tiny_model, random_batch
from offbeat_rollout import RolloutConfig
from offbeat_trainer import AlgorithmConfig
from offbeat_trainer.algorithms.policy_loss import PolicyLoss
from offbeat_trainer.config import ClusterConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory):
    from offbeat_trainer.cluster.cluster import Cluster
    from offbeat_trainer.cluster.spec import ClusterSpec, RolloutSpec, TrainSpec

    folder = tmp_path_factory.mktemp("supervision")
    model = str(make_tiny_model(folder / "tiny"))
    train = TrainSpec(
        engine_name="fsdp2",
        device="cpu",
        num_ranks=1,
        threads_per_rank=1,
        loss_fn=PolicyLoss(config=AlgorithmConfig(), max_completion_tokens=8),
        updates_per_step=1,
        checkpoint_dir=str(folder / "policy"),
        keep_checkpoints=2,
        collective_timeout_s=TIMEOUT_S,
        sync=SyncConfig(canary=True),
    )
    spec = ClusterSpec(
        cluster=ClusterConfig(object_store_mib=128),
        train=train,
        rollout=RolloutSpec(
            adapter_name="hf", rollout=RolloutConfig(model_path=model, max_model_len=64), num_replicas=2
        ),
        log_dir=str(folder / "logs"),
        step_timeout_s=TIMEOUT_S,
    )
    cluster = Cluster(spec)
    try:
        await asyncio.gather(cluster.train.start(), cluster.rollout.start())
        await cluster.train.build(
            EngineConfig(model=ModelConfig(path=model), optimizer=OptimizerConfig(lr=1e-2))
        )
        yield cluster
    finally:
        await cluster.stop()


async def test_the_manager_reads_what_each_serves_and_fences_by_name(cluster):
    from offbeat_trainer.cluster.weights import RemoteMember

    publisher = cluster.publisher()
    members = {
        name: RemoteMember(name, handle, SyncConfig(), cluster.rollout)
        for name, handle in cluster.rollout.handles.items()
    }
    assert all(isinstance(member, SupervisedMember) for member in members.values())
    started = [await member.status() for member in members.values()]
    assert [(one.version, one.label, one.committed) for one in started] == [(0, None, False)] * 2

    report = await publisher.publish(1)  # both canaries agree
    assert sorted(report.members) == ["replica 0", "replica 1"]
    served = {name: await member.status() for name, member in members.items()}
    for status in served.values():
        assert (status.version, status.committed) == (1, True)
        assert status.label.content_digest == report.content_digest
    answers = [await member.canary() for member in members.values()]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 4

    await members["replica 1"].fence("a test says so")
    one, other = [await member.status() for member in members.values()]
    assert (one.committed, other.label, other.committed) == (True, None, False)

    await cluster.train.supervise(random_batch(4))
    await publisher.publish(2)
    again = {name: await member.status() for name, member in members.items()}
    assert {status.version for status in again.values()} == {2}
    assert again["replica 0"] == again["replica 1"]
    assert again["replica 1"].committed
