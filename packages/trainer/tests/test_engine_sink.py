"""What grows with the model is asked of an engine before the flip, and has the deadline of the transfer."""

import asyncio
import threading

import pytest
import torch

from offbeat_ckptsync import SyncConfig
from offbeat_ckptsync.errors import TransferError
from offbeat_ckptsync.member.receiver import Receiver, State
from offbeat_ckptsync.plan.manifest import manifest_of
from offbeat_ckptsync.source.sender import Sender
from offbeat_ckptsync.testing import DictSource
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from offbeat_ckptsync.values import Seat
from offbeat_rollout import TensorUpdates
from offbeat_trainer.weights.member import EngineSink

WEIGHTS = {"a": torch.arange(6.0), "b": torch.ones(3, 5)}


class Preparing(TensorUpdates):
    """Prepares for as long as `ready` is not set."""

    def __init__(self):
        self.ready = asyncio.Event()
        self.calls = []

    async def specs(self):
        return []

    async def prepare(self, tensors, version):
        self.calls.append(("prepare", version, {name: tensor.clone() for name, tensor in tensors}))
        await self.ready.wait()

    async def load(self, tensors, version, *, recompute_kv=False):
        self.calls.append(("load", version, {name: tensor.clone() for name, tensor in tensors}))


def sync(sink):
    """Send `WEIGHTS` as version 1 to a receiver of `sink`; return it."""
    sender, receiver = (
        Sender(DictSource(WEIGHTS), SyncConfig(transport="loopback")),
        Receiver(Seat(member="m"), sink),
    )
    offer, sent = sender.offer(1, ["m"]), []
    receiver.begin(offer)
    sending = threading.Thread(target=lambda: sent.append(sender.send(offer)))
    sending.start()
    try:
        receiver.transfer(LoopbackTransport())
    finally:
        sending.join(120)
    receiver.verify(offer.sync_id, sent[0])
    receiver.flip(offer.sync_id, sent[0])
    return receiver


def sink_of(updates, prepare_timeout_s):
    manifest = manifest_of(WEIGHTS.items())
    return EngineSink(
        updates, manifest, asyncio.get_running_loop(), timeout_s=600.0, prepare_timeout_s=prepare_timeout_s
    )


async def test_an_engine_prepares_what_it_then_loads():
    updates = Preparing()
    updates.ready.set()
    receiver = await asyncio.to_thread(sync, sink_of(updates, 600.0))
    assert (receiver.version, receiver.state) == (1, State.FLIPPED)
    assert [(what, version) for what, version, _ in updates.calls] == [("prepare", 1), ("load", 1)]
    for _, _, tensors in updates.calls:
        assert tensors.keys() == WEIGHTS.keys()
        assert all(torch.equal(tensors[name], want) for name, want in WEIGHTS.items())


async def test_one_that_prepares_for_too_long_keeps_its_weights():
    updates = Preparing()
    with pytest.raises(TransferError, match=r"took longer than 0\.01 s; raise `sync\.transfer_timeout_s`"):
        await asyncio.to_thread(sync, sink_of(updates, 0.01))
    assert [what for what, *_ in updates.calls] == ["prepare"]
