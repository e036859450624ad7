"""One of the receivers is killed in the middle of a broadcast: nobody else's process ends, and the next sync is good."""

from __future__ import annotations

import pytest

from offbeat_ckptsync.config import SyncConfig
from offbeat_ckptsync.testing.hurt import content_of, weights_of
from offbeat_ckptsync.testing.troupe import Troupe

pytestmark = pytest.mark.spawns


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu", 3), id="gloo"),
        pytest.param(("cuda", 1), id="nccl-1", marks=pytest.mark.gpu(2)),
        pytest.param(("cuda", 3), id="nccl-3", marks=pytest.mark.gpu(4)),
    ],
)
def troupe(request):
    device, receivers = request.param
    config = SyncConfig(
        transport="broadcast",
        device=device,
        bucket_mib=64 / 1024,
        begin_timeout_s=120.0,
        transfer_timeout_s=10.0,  # where no socket breaks, as within one node over NCCL, only this says that a peer is lost
    )
    made = Troupe(config, receivers=tuple(f"r{i}" for i in range(receivers)))
    yield made
    made.close()


def sync(troupe):
    troupe.version += 1
    troupe.sender.ask("weights", troupe.version)
    return troupe.manager.ask("sync", troupe.version, {})


@pytest.mark.parametrize("lost", [-1, 0])
def test_the_survivors_live_and_the_next_sync_is_good(troupe, lost):
    victim = troupe.receivers[lost]
    others = [name for name in troupe.receivers if name != victim]
    result = sync(troupe)
    assert sorted(result["members"]) == sorted(troupe.receivers), result
    pids = {name: actor.pid for name, actor in troupe.actors.items() if name != victim}
    troupe.actors[victim].ask("arm", "transfer", "killed")
    result = sync(troupe)
    troupe.actors[victim].process.join(60)
    assert victim in (result.get("error", "") + str(result.get("left", ""))), result
    for name, (version, content, *_) in troupe.serving().items():
        assert content == content_of(weights_of(version)), f"{name} serves what is not version {version}"
    assert all(troupe.actors[name].is_alive() for name in pids)
    if others:
        assert sorted(result["members"]) == sorted(others), result
    assert troupe.heal() == [victim]
    result = sync(troupe)
    assert sorted(result["members"]) == sorted(troupe.receivers), result
    good = [troupe.version, content_of(weights_of(troupe.version)), True, "idle"]
    assert troupe.serving() == dict.fromkeys(troupe.receivers, good)
    assert {name: troupe.actors[name].pid for name in pids} == pids
