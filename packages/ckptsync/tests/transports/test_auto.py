from __future__ import annotations

import dataclasses
import itertools
import threading

import pytest

from offbeat_ckptsync.config import SyncConfig, make_transport
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.member.sinks import DictSink
from offbeat_ckptsync.source.sender import Sender
from offbeat_ckptsync.testing import DictSource, LocalSync, assert_same, awkward_weights
from offbeat_ckptsync.transports import auto
from offbeat_ckptsync.transports.topology import here
from offbeat_ckptsync.values import Seat

CONFIG = SyncConfig(transport="auto", bucket_mib=4096 / (1 << 20))


async def synced(local, version):
    local.source.weights = awkward_weights(version)
    report = await local.manager.sync(version)
    for receiver in local.receivers.values():
        assert receiver.version == version
    return report


async def test_on_one_machine_it_is_shm_and_elsewhere_relay_and_the_report_says_why(monkeypatch):
    sinks = {"a": DictSink(), "b": DictSink()}
    local = LocalSync(
        DictSource(awkward_weights(1)), dict(sinks), CONFIG, lambda: make_transport("auto", CONFIG)
    )
    report = await synced(local, 1)
    assert report.transport == "shm"
    assert "all 2 receiving ranks are on the source's machine" in report.why
    calls = itertools.count()

    def far_away(device):
        place = here(device)
        return dataclasses.replace(place, host="elsewhere") if next(calls) == 0 else place

    monkeypatch.setattr(auto, "here", far_away)
    report = await synced(local, 2)
    assert report.transport == "relay"
    assert "is on another machine" in report.why
    monkeypatch.undo()
    report = await synced(local, 3)
    assert report.transport == "shm"
    for sink in sinks.values():
        assert_same(sink.weights, awkward_weights(3))
    local.close()


def test_it_names_who_is_missing():
    sender = Sender(DictSource(awkward_weights(1)), dataclasses.replace(CONFIG, begin_timeout_s=0.3))
    offer = sender.offer(1, ["gone"])
    with pytest.raises(TransferError, match=r"auto: no answer within 0\.3 s .* missing: rank 0 of gone"):
        sender.send(offer)
    sender.close()


def test_cuda_ipc_without_cuda_is_refused_with_what_to_use():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    with pytest.raises(SyncError, match=r"needs a CUDA device and torch sees none; use `shm` or `auto`"):
        make_transport("cuda_ipc", CONFIG)


def test_an_abort_before_a_transport_is_taken_ends_its_waits_too(monkeypatch):
    config = dataclasses.replace(CONFIG, begin_timeout_s=2.0)
    sender, seat = Sender(DictSource(awkward_weights(1)), config), auto.AutoTransport(config)
    offer = sender.offer(1, ["m"])
    hear = seat.rendezvous.hear

    def heard(*at):
        told = hear(*at)
        seat.abort(offer.sync_id)
        return told

    monkeypatch.setattr(seat.rendezvous, "hear", heard)
    picking = threading.Thread(target=lambda: sender._transport.lend(offer, 64))
    picking.start()
    with pytest.raises(TransferError, match="was aborted"):  # and not: nothing came in time
        seat.receiver(offer, Seat(member="m"))
    picking.join(60)
    sender.close()
    seat.close()
