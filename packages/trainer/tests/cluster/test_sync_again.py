"""A sync that fails while its members are well is made again by the run: the old weights are whole."""

import asyncio

import pytest

from offbeat_ckptsync import SyncConfig, SyncFailed
from offbeat_trainer.cluster import publisher
from sync_faults.hurt import content_of, weights_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
async def site(tmp_path_factory, ray_environment):
    from sync_faults.over_ray import Site

    async with Site.opened(
        tmp_path_factory.mktemp("again"), SyncConfig(transport="shm", bucket_mib=1 / 16), num_replicas=1
    ) as opened:
        yield opened


async def update(site, seed):
    """Train: the weights are `weights_of(seed)` from now on."""
    async with site.cluster.train._devices_alone():
        await site.rank.take.remote(seed)


async def test_a_failed_sync_is_tried_again_and_told(site, monkeypatch, caplog):
    monkeypatch.setattr(publisher, "PAUSE_S", 0.01)
    await update(site, 1)
    await site.publisher.publish(1)
    await update(site, 2)
    await site.rank.arm.remote("verify", "corrupting")
    report = await site.publisher.publish(2)
    assert (report.version, len(report.failures)) == (2, 1)
    assert "digest" in report.failures[0]
    assert "the sync of version 2 is tried again" in caplog.text
    assert await site.held() == {"replica 0": (2, content_of(weights_of(2)), True)}


async def test_what_is_tried_again_beside_training_has_the_version_of_its_weights(site, monkeypatch):
    """The first try copies out the weights of version 3 and fails; by then training has made those of version 4."""
    monkeypatch.setattr(publisher, "PAUSE_S", 0.5)
    await update(site, 3)
    await site.rank.arm.remote("verify", "corrupting")
    trained = []

    def train():
        trained.append(asyncio.create_task(update(site, 4)))

    report = await site.publisher.publish(3, train)
    assert len(trained) == 2, "both tries let training go on"
    assert (report.version, len(report.failures)) == (4, 1)
    assert await site.held() == {"replica 0": (4, content_of(weights_of(4)), True)}
    assert site.publisher._updates == 4
    for task in trained:
        await task


async def test_one_that_fails_every_time_ends_in_its_error_and_serves_the_old_version(site, monkeypatch):
    before = await site.held()
    (version, _, _) = before["replica 0"]
    replica = site.cluster.rollout.handles["replica 0"]
    tries = []

    async def again(seconds):
        if seconds == publisher.PAUSE_S:
            tries.append(seconds)
            await replica.arm.remote("verify", "corrupting")

    await replica.arm.remote("verify", "corrupting")
    monkeypatch.setattr(publisher.asyncio, "sleep", again)
    with pytest.raises(SyncFailed, match="digest"):
        await site.publisher.publish(version + 1)
    assert len(tries) == publisher.MAX_SYNCS - 1
    assert await site.held() == before


async def test_what_is_trained_as_soon_as_it_may_be_changes_nothing_that_is_on_its_way(site):
    (version, _, _) = (await site.held())["replica 0"]
    for seed in range(version + 1, version + 4):
        await update(site, seed)
        trained = []
        await site.publisher.publish(seed, lambda: trained.append(site.rank.take.remote(0)))  # noqa: B023
        assert await site.held() == {"replica 0": (seed, content_of(weights_of(seed)), True)}
        await trained[0]
