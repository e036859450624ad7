"""A replacement that nobody can give the committed weights takes part in the next sync, while the others serve."""

import os
import signal

import pytest

from offbeat_ckptsync import SyncConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]


async def update(site, seed):
    """Train: the weights are those of `seed` from now on."""
    async with site.cluster.train._devices_alone():
        await site.rank.take.remote(seed)


async def test_a_replacement_that_cannot_have_the_committed_content_joins_with_the_next_sync(
    tmp_path, ray_environment, until, pid_of, monkeypatch
):
    """The source's content has another label by now, as digests of another transport give it, and no peer has a copy."""
    from sync_faults.over_ray import Site

    async def nothing(_):
        return False

    config = SyncConfig(transport="shm", bucket_mib=1 / 16)
    async with Site.opened(tmp_path, config, num_replicas=2) as site:
        made, rollout = site.publisher, site.cluster.rollout
        monkeypatch.setattr(made, "_comes_from_a_peer", nothing)
        await update(site, 1)
        await made.publish(1)
        await site.rank.take.remote(7)  # and no update was counted
        os.kill(await pid_of(rollout.handles["replica 1"]), signal.SIGKILL)
        await until(
            lambda: "replica 1" in made._waiting and "replica 1" in made._manager.members,
            "the replacement to wait for the next sync",
        )
        assert rollout.serving == {"replica 0": 1}
        await made.rescue()  # which finds nothing to do for it
        await update(site, 2)
        assert sorted((await made.publish(2)).members) == ["replica 0", "replica 1"]
        assert rollout.serving == {"replica 0": 2, "replica 1": 2}
