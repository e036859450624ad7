"""One of the receivers is killed in the middle of a broadcast: nobody else's process ends, and the next sync is good."""

from __future__ import annotations

import pytest

from offbeat_ckptsync.toolkit.config import SyncConfig
from sync_faults.hurt import content_of, weights_of
from sync_faults.processes import FaultProcesses

pytestmark = pytest.mark.spawns


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu", 3), id="gloo"),
        pytest.param(("cuda", 1), id="nccl-1", marks=pytest.mark.gpu(2)),
        pytest.param(("cuda", 3), id="nccl-3", marks=pytest.mark.gpu(4)),
    ],
)
def cluster(request):
    device, receivers = request.param
    config = SyncConfig(
        transport="broadcast",
        device=device,
        bucket_mib=64 / 1024,
        begin_timeout_s=120.0,
        transfer_timeout_s=10.0,  # where no socket breaks, as within one node over NCCL, only this says that a peer is lost
    )
    made = FaultProcesses(config, receivers=tuple(f"r{i}" for i in range(receivers)))
    yield made
    made.close()


def sync(cluster):
    cluster.version += 1
    cluster.sender.ask("weights", cluster.version)
    return cluster.manager.ask("sync", cluster.version, {})


@pytest.mark.parametrize("lost", [-1, 0])
def test_the_survivors_live_and_the_next_sync_is_good(cluster, lost):
    victim = cluster.receivers[lost]
    others = [name for name in cluster.receivers if name != victim]
    result = sync(cluster)
    assert sorted(result["members"]) == sorted(cluster.receivers), result
    pids = {name: actor.pid for name, actor in cluster.actors.items() if name != victim}
    cluster.actors[victim].ask("arm", "transfer", "killed")
    result = sync(cluster)
    cluster.actors[victim].process.join(60)
    assert victim in (result.get("error", "") + str(result.get("left", ""))), result
    for name, (version, content, *_) in cluster.serving().items():
        assert content == content_of(weights_of(version)), f"{name} serves what is not version {version}"
    assert all(cluster.actors[name].is_alive() for name in pids)
    if others:
        assert sorted(result["members"]) == sorted(others), result
    assert cluster.heal() == [victim]
    result = sync(cluster)
    assert sorted(result["members"]) == sorted(cluster.receivers), result
    good = [cluster.version, content_of(weights_of(cluster.version)), True, "idle"]
    assert cluster.serving() == dict.fromkeys(cluster.receivers, good)
    assert {name: cluster.actors[name].pid for name in pids} == pids
