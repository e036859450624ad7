from __future__ import annotations

import dataclasses
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from offbeat_ckptsync.control.members import LocalMember
from offbeat_ckptsync.ends.buckets import bucket_starts, buckets_of
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.ends.staging import stage
from offbeat_ckptsync.errors import SyncError, TransferError
from offbeat_ckptsync.seams import NO_TRAFFIC
from offbeat_ckptsync.testing import DictSource, LocalSync, assert_same, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.transports import auto
from offbeat_ckptsync.transports.rendezvous import Choice, here
from offbeat_ckptsync.values import RankId

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
    sender, rank_id = Sender(DictSource(awkward_weights(1)), config), auto.AutoTransport(config)
    offer = sender.offer(1, ["m"])
    hear = rank_id.rendezvous.hear

    def heard(*at):
        told = hear(*at)
        rank_id.abort(offer.sync_id)
        return told

    monkeypatch.setattr(rank_id.rendezvous, "hear", heard)
    picking = threading.Thread(target=lambda: sender._transport.lend(offer, 64))
    picking.start()
    with pytest.raises(TransferError, match="was aborted"):  # and not: nothing came in time
        rank_id.receiver(offer, RankId(member="m"))
    picking.join(60)
    sender.close()
    rank_id.close()


def on_a_gpu(monkeypatch, local, free_bytes):
    """Let the source's tensors lie on a GPU, which all share; `free_bytes` answers how much of it is free."""

    def place(device):
        return dataclasses.replace(here("cpu"), gpu="GPU-a", free_bytes=free_bytes(device))

    monkeypatch.setattr(auto, "here", place)
    local.sender._transport._device = "cuda:0"


async def test_once_through_host_memory_it_stays_there_so_that_a_joiner_reaches_the_label(monkeypatch):
    local = LocalSync(
        DictSource(awkward_weights(1)), {"a": DictSink()}, CONFIG, lambda: make_transport("auto", CONFIG)
    )
    room = [10]
    on_a_gpu(monkeypatch, local, lambda device: room[0])
    report = await synced(local, 1)
    assert report.transport == "shm"
    assert "do not fit on the GPU of rank 0 of a" in report.why
    room[0] = 1 << 40  # a fresh replica has more: by cuda_ipc its digests would be of another kind
    late, transport = Receiver(RankId(member="late"), DictSink()), make_transport("auto", CONFIG)
    report = await local.manager.catch_up(LocalMember(late, transport, gate=NO_TRAFFIC))
    assert (report.version, report.transport) == (1, "shm")
    assert late.status().label == local.receivers["a"].status().label
    report = await synced(local, 2)
    assert "through host memory since" in report.why
    assert local.sender._transport.open("next", ["a"])["free_bytes"] == 0
    local.close()
    transport.close()


def test_what_a_rank_stages_in_again_counts_as_free(monkeypatch):
    """The staging memory of a GPU is kept from sync to sync: the second one has room where the first had."""
    sender = Sender(DictSource(awkward_weights(1)), CONFIG)
    source, rank_id = sender._transport, auto.AutoTransport(CONFIG)
    kept = [0]
    monkeypatch.setattr(
        auto, "here", lambda _: dataclasses.replace(here("cpu"), gpu="GPU-a", free_bytes=100 - kept[0])
    )
    source._device = "cuda:0"
    seen = []

    def choose(_, places, **__):
        seen.append({name: place.free_bytes for name, place in places.items()})
        return Choice(transport="shm", device="cuda", why="planted")

    monkeypatch.setattr(auto, "choose", choose)
    monkeypatch.setattr(source, "_take", lambda *_: source)
    monkeypatch.setattr(rank_id, "_take", lambda *_: SimpleNamespace(receiver=lambda *_: None))
    for version in (1, 2):
        offer = sender.offer(version, ["m"])
        assert offer.endpoint["free_bytes"] == 100
        rank_id.spare_bytes = kept[0]
        picking = threading.Thread(target=source._pick, args=(offer, 80))
        picking.start()
        rank_id.receiver(offer, RankId(member="m"))
        picking.join(60)
        kept[0] = 80
    assert seen == [{"rank 0 of m": 100}] * 2
    source.abort("gone")
    assert source.open("3", ["m"])["free_bytes"] == 20, "nobody knows what is left after an abort"
    sender.close()
    rank_id.close()


@pytest.mark.parametrize(
    ("device", "more", "is_counted"), [("cuda:0", 0, True), ("cuda:0", 1, False), ("cpu", 0, False)]
)
def test_staging_says_what_it_has_on_the_gpu_already(device, more, is_counted):
    class Noting:
        device = "cpu"
        spare_bytes = 1

        def receiver(self, *_):
            raise TransferError(f"{self.spare_bytes} spare")

    sender = Sender(DictSource({"a": torch.zeros(2)}), CONFIG)
    offer = sender.offer(1, ["m"])
    num_bytes = bucket_starts(buckets_of(offer))[1]
    spare = SimpleNamespace(device=device, num_bytes=num_bytes + more)
    with pytest.raises(TransferError, match=f"^{num_bytes if is_counted else 0} spare"):
        stage(Noting(), offer, RankId(member="m"), buckets_of(offer), spare)
    sender.close()
