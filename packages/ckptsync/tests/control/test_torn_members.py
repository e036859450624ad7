"""A member of two ranks of which one does not change over: whatever the other did, it is whole no more."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from offbeat_ckptsync.control.manager import CheckpointEngineManager
from offbeat_ckptsync.control.members import ControlMember
from offbeat_ckptsync.control.ranks import Mailbox
from offbeat_ckptsync.ends.rank import Rank
from offbeat_ckptsync.ends.sender import LocalSource, Sender
from offbeat_ckptsync.ends.sinks import DictSink, ModuleSource
from offbeat_ckptsync.errors import ManifestError, SyncFailed
from offbeat_ckptsync.seams import GenerationGate
from offbeat_ckptsync.toolkit.config import SyncConfig

CONFIG = SyncConfig(transport="loopback")
REFUSED, TORN = ManifestError("cannot read it, nothing was changed"), MemoryError("half-way")


class Sink(DictSink):
    """Loads, or fails as it is told."""

    error = None

    def load(self, tensors, version):
        if self.error is not None:
            raise self.error
        super().load(tensors, version)


class Gate(GenerationGate):
    def __init__(self):
        self.paused = 0

    async def pause(self):
        self.paused += 1

    async def resume(self):
        self.paused -= 1


@pytest.mark.parametrize(
    ("errors", "stays"),
    [((REFUSED, None), False), ((REFUSED, TORN), False), ((None, TORN), False), ((REFUSED, REFUSED), True)],
    ids=["refused and loaded", "refused and torn", "loaded and torn", "both refused"],
)
async def test_a_member_whose_ranks_part_is_fenced_off_and_generates_no_more(errors, stays):
    sinks, gate, module = [Sink(), Sink()], Gate(), torch.nn.Linear(8, 8)
    workers = [Rank(sink, rank=rank, num_ranks=2) for rank, sink in enumerate(sinks)]

    async def control(op, payload):
        if op == "update":
            answers = [asyncio.to_thread(worker.handle, payload) for worker in workers]
            for answer in await asyncio.gather(*answers, return_exceptions=True):
                if isinstance(answer, Exception):
                    raise answer

    sender = Sender(ModuleSource(module), CONFIG)
    manager = CheckpointEngineManager(LocalSource(sender), CONFIG)
    manager.add(ControlMember("pair", control, mailbox=Mailbox(), config=CONFIG, gate=gate))
    await manager.sync(1)
    for sink, error in zip(sinks, errors, strict=True):
        sink.error = error
    with pytest.raises(SyncFailed, match="pair"):
        await manager.sync(2)
    assert ("pair" in manager.members) == stays
    assert ("pair" in manager.fenced) != stays
    assert gate.paused == (0 if stays else 1), "torn weights must not generate"
    sender.close()


async def test_a_member_of_which_a_rank_says_nothing_in_the_flip_generates_no_more():
    sinks, gate = [Sink(), Sink()], Gate()
    workers = [Rank(sink, rank=rank, num_ranks=2) for rank, sink in enumerate(sinks)]

    async def control(op, payload):
        if op == "update":
            asked = workers[:1] if payload["op"] == "flip" and sinks[0].version else workers
            await asyncio.gather(*(asyncio.to_thread(worker.handle, payload) for worker in asked))

    sender = Sender(ModuleSource(torch.nn.Linear(8, 8)), CONFIG)
    manager = CheckpointEngineManager(LocalSource(sender), CONFIG)
    config = dataclasses.replace(CONFIG, flip_timeout_s=1.0)  # it says so before the manager stops waiting
    manager.add(ControlMember("pair", control, mailbox=Mailbox(), config=config, gate=gate))
    await manager.sync(1)
    with pytest.raises(SyncFailed, match="rank 1 of pair did not answer within 1 s"):
        await manager.sync(2)
    assert [sink.version for sink in sinks] == [2, 1]
    assert gate.paused == 1, "two versions must not generate together"
    sender.close()
