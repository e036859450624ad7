"""Which GPU a thread works on, tried without one: torch's own fake tensors, and what `set_device` is told, by thread."""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from offbeat_ckptsync.ends.buffers import Buffers
from offbeat_ckptsync.ends.receiver import Receiver
from offbeat_ckptsync.ends.sender import Sender
from offbeat_ckptsync.ends.sinks import DictSink
from offbeat_ckptsync.ends.staging import Memory
from offbeat_ckptsync.errors import SyncError
from offbeat_ckptsync.testing import DictSource, LocalSync, assert_same, awkward_weights
from offbeat_ckptsync.toolkit.config import SyncConfig, make_transport
from offbeat_ckptsync.toolkit.threads import own_device, use_device
from offbeat_ckptsync.transports import auto, rendezvous
from offbeat_ckptsync.transports.cuda_ipc import _Slots
from offbeat_ckptsync.transports.loopback import LoopbackTransport
from offbeat_ckptsync.values import RankId


class Gpus:
    """Two GPUs that are not there: each thread has a current one, the first until it is told otherwise."""

    def __init__(self, monkeypatch):
        self._of_thread = threading.local()
        self.streams = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", self.current)
        monkeypatch.setattr(torch.cuda, "set_device", self.set)
        monkeypatch.setattr(torch.cuda, "Stream", self.stream)
        monkeypatch.setattr(torch.cuda, "stream", self.using)

    def current(self):
        return getattr(self._of_thread, "index", 0)

    def set(self, device):
        self._of_thread.index = torch.device(device).index

    def stream(self, device):
        self.streams.append(torch.device(device))
        return self.streams[-1]

    @contextmanager
    def using(self, stream):
        before = self.current()
        self.set(stream)
        yield
        self._of_thread.index = before


@pytest.fixture
def gpus(monkeypatch):
    return Gpus(monkeypatch)


class Seen(LoopbackTransport):
    """A transport of a rank on the second GPU that notes on which one its calls come; its bytes are in host memory."""

    device = "cuda:1"

    def __init__(self, gpus):
        self._gpus = gpus
        self.on = []

    def sender(self, offer, members):
        self.on.append(("sender", self._gpus.current()))
        inner = super().sender(offer, members)
        send = inner.send

        def seen(bucket, payload):
            self.on.append(("send", self._gpus.current()))
            send(bucket, payload)

        inner.send = seen
        return inner

    def receiver(self, offer, rank_id):
        self.on.append(("receiver", self._gpus.current()))
        end = super().receiver(offer, rank_id)
        end.lend = lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8)
        receive = end.receive

        def seen(bucket, into):
            self.on.append(("receive", self._gpus.current()))
            receive(bucket, into)

        end.receive = seen
        return end


def test_both_sides_of_a_transfer_work_on_the_gpu_of_their_transport_in_all_their_threads(gpus):
    config = SyncConfig(transport="loopback", bucket_mib=4096 / (1 << 20))
    near, far = Seen(gpus), Seen(gpus)
    sender = Sender(DictSource(awkward_weights(1)), config, transport=near)
    buffers = Buffers(near.device)
    buffers.take = Buffers().take
    sender._own_buffers = lambda: buffers
    receiver = Receiver(RankId(member="m"), DictSink())
    offer = sender.offer(1, ["m"])
    receiver.begin(offer)
    taking = threading.Thread(target=receiver.transfer, args=(far,))
    taking.start()
    sender.send(offer)
    taking.join(600)
    assert {what for what, _ in near.on} == {"sender", "send"}
    assert {what for what, _ in far.on} == {"receiver", "receive"}
    assert {index for _, index in near.on + far.on} == {1}
    assert gpus.current() == 0, "the thread that called is left as it was"


def test_cuda_is_the_calling_threads_gpu_by_its_index(gpus):
    use_device("cuda:1")
    assert own_device("cuda") == "cuda:1"
    assert own_device("cpu") == "cpu"
    for name in ("broadcast", "auto", "cuda_ipc"):
        assert make_transport(name, SyncConfig(transport=name, device="cuda")).device == "cuda:1"
    use_device("cpu")
    assert gpus.current() == 1


def test_without_a_gpu_cuda_is_refused_with_what_to_set():
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    with pytest.raises(SyncError, match='set `device` to "cpu"'):
        make_transport("broadcast", SyncConfig(device="cuda"))


async def test_auto_goes_through_host_memory_where_a_receiver_shares_the_sources_gpu(gpus, monkeypatch):
    use_device("cuda:1")
    monkeypatch.setattr(rendezvous, "gpu_uuid", lambda index: f"GPU-{index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1 << 40, 1 << 40))
    calls = itertools.count()
    poor = {"GPU-0": rendezvous.Link.NONE, "GPU-1": rendezvous.Link.SAME}
    monkeypatch.setattr(rendezvous, "link_between", lambda one, other: poor[other])
    monkeypatch.setattr(auto, "here", lambda device: rendezvous.here(f"cuda:{next(calls) % 2}"))
    config = SyncConfig(transport="auto", device="cuda", bucket_mib=4096 / (1 << 20))
    sinks = {"a": DictSink(), "b": DictSink()}
    local = LocalSync(
        DictSource(awkward_weights(1)), dict(sinks), config, lambda: make_transport("auto", config)
    )
    for version in (1, 2):
        local.source.weights = awkward_weights(version)
        report = await local.manager.sync(version)
        assert report.transport == "shm"
        assert "share a GPU, which NCCL refuses" in report.why
        for sink in sinks.values():
            assert_same(sink.weights, awkward_weights(version))
    local.close()


def test_memory_slots_and_places_are_of_the_gpu_by_its_index(gpus, monkeypatch):
    monkeypatch.setattr(rendezvous, "gpu_uuid", lambda index: f"GPU-{index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (index * 100, 200))
    place = rendezvous.here("cuda:1")
    assert (place.gpu, place.free_bytes) == ("GPU-1", 100)
    with FakeTensorMode():
        assert Memory(100, "cuda:1").lend().device == torch.device("cuda:1")
        assert Buffers("cuda:1").take(1, 100)[0].device == torch.device("cuda:1")
        slots = _Slots.make(100, "cuda:1").slots
        assert {slot.device for slot in slots} == {torch.device("cuda:1")}


def test_buckets_are_larger_on_gpus_unless_they_are_set():
    assert SyncConfig().bucket_bytes == 32 << 20
    assert SyncConfig(device="cuda").bucket_bytes == 512 << 20
    assert SyncConfig(device="cuda", bucket_mib=1.5).bucket_bytes == 3 << 19
