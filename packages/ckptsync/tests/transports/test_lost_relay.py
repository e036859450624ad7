"""A relay is killed in the middle of a transfer: it is named, everybody keeps the old version, the next sync is good."""

from __future__ import annotations

import dataclasses

import pytest

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.testing import DictSource, awkward_weights
from offbeat_ckptsync.testing.fakes import prints_of
from offbeat_ckptsync.toolkit.config import SyncConfig
from offbeat_ckptsync.transports.relay import RelayTransport
from ranks_apart import RankApart

pytestmark = pytest.mark.spawns

CONFIG = SyncConfig(
    transport="relay", bucket_mib=4096 / (1 << 20), begin_timeout_s=120.0, transfer_timeout_s=120.0
)
MACHINES = {"r0": "a", "r1": "a", "r2": "a", "r3": "b", "r4": "b"}


async def serving(ranks):
    return {name: await rank.serving() for name, rank in ranks.items() if rank.process.is_alive()}


async def synced(manager, source, ranks, version):
    source.weights = awkward_weights(version)
    report = await manager.sync(version)
    good = (version, prints_of(source.weights))
    assert await serving(ranks) == dict.fromkeys(ranks, good)
    return [name for name, num_bytes in report.received_bytes.items() if num_bytes]


async def test_a_relay_that_dies_is_named_and_the_old_version_stays():
    source = DictSource(awkward_weights(0))
    sender = Sender(source, CONFIG, transport=RelayTransport(CONFIG, machine="s"))
    manager = CheckpointEngineManager(LocalSource(sender), dataclasses.replace(CONFIG, silent="fail"))
    ranks = {name: RankApart(name, CONFIG, machine=machine) for name, machine in MACHINES.items()}
    try:
        for rank in ranks.values():
            manager.add(rank)
        assert await synced(manager, source, ranks, 1) == ["r0/0", "r3/0"]
        before = {name: good for name, good in (await serving(ranks)).items() if name != "r0"}
        source.weights = awkward_weights(2)
        await ranks["r0"].arm("kill", 2)
        with pytest.raises(SyncFailed, match=r"r1: .*rank 0 of r1 reads from relay r0/0: .* gave up or died"):
            await manager.sync(2)
        assert await serving(ranks) == before
        manager.remove("r0")
        ranks["r0"] = RankApart("r0", CONFIG, machine="a")
        source.weights = awkward_weights(1)
        await manager.catch_up(ranks["r0"])
        # Last of the members now, so another rank of its machine relays.
        assert sorted(await synced(manager, source, ranks, 3)) == ["r1/0", "r3/0"]
    finally:
        for rank in ranks.values():
            rank.close()
        sender.close()
