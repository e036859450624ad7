"""A joiner that is given the weights that another replica serves from where they were staged, and a replica that spoilt them."""

from __future__ import annotations

import pytest
import torch

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import LocalMember, StagedCopy
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import AdoptingModuleSink, ModuleSource
from offbeat_ckptsync.errors import SyncFailed
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.values import RankId


class Party:
    """A trainer and replicas that serve over shared memory, all in this process."""

    def __init__(self):
        self.config = SyncConfig(transport="shm", bucket_mib=1 / 64)
        self.trained = torch.nn.Linear(64, 64)
        self.sender = Sender(ModuleSource(self.trained), self.config)
        self.manager = CheckpointEngineManager(LocalSource(self.sender), self.config)
        self.replicas = {}
        self.open = [self.sender]

    def replica(self, name):
        module = self.replicas[name] = torch.nn.Linear(64, 64)
        receiver = Receiver(RankId(member=name), AdoptingModuleSink(module))
        copies, transport = Sender(StagedCopy(receiver), self.config), make_transport("shm", self.config)
        self.open += [copies, transport]
        return LocalMember(receiver, transport, copies=LocalSource(copies), gate=NO_TRAFFIC)

    def train(self):
        with torch.no_grad():
            self.trained.weight.add_(1)
        return self.trained.weight.detach().clone()


@pytest.fixture
async def party():
    party = Party()
    party.manager.add(party.replica("one"))
    yield party
    for each in party.open:
        each.close()


async def test_a_joiner_is_given_what_another_replica_serves_while_training_has_gone_on(party):
    served = party.train()
    await party.manager.sync(1)
    party.train()
    report = await party.manager.catch_up(party.replica("late"), peers_only=True)
    assert [*report.members] == ["late"]
    assert torch.equal(party.replicas["late"].weight, served)
    newer = party.train()
    assert sorted((await party.manager.sync(2)).members) == ["late", "one"]
    for replica in party.replicas.values():
        assert torch.equal(replica.weight, newer)


async def test_weights_that_a_replica_has_written_into_are_given_to_nobody(party):
    served = party.train()
    await party.manager.sync(1)
    with torch.no_grad():
        party.replicas["one"].weight[0, 0] += 1
    late = party.replica("late")
    with pytest.raises(SyncFailed, match="no longer those committed"):
        await party.manager.catch_up(late, peers_only=True)
    await party.manager.catch_up(late)  # from the trainer, which has them still
    assert torch.equal(party.replicas["late"].weight, served)


async def test_what_joiners_were_given_from_takes_memory_until_the_syncs_after_it_only(party):
    """A replica kept up to three models for joiners, for life."""
    party.train()
    await party.manager.sync(1)
    await party.manager.catch_up(party.replica("late"), peers_only=True)
    held = party.manager._members["one"].peer()._sender._transport._segments
    assert len(held) == 1
    for version in (2, 3):
        party.train()
        await party.manager.sync(version)
    assert party.manager._members["one"].peer()._sender._transport._segments == []
    await party.manager.catch_up(party.replica("later"), peers_only=True)
    assert torch.equal(party.replicas["later"].weight, party.trained.weight)
